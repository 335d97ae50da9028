"""Dry runs of the GPU presets with a stub `nvidia-smi`, against recorded output.

`DRY_RUNS=write` rewrites the recorded files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from gpu_host import H100, of_size, stub_nvidia_smi
from panda import PANDA

from embodyrl.cli.dry_run import describe
from embodyrl.commands import banner as command_facts
from embodyrl.config.paths import assets_dir
from embodyrl.devices import Gpus
from embodyrl.envs import factory as env_factory
from embodyrl.envs.libero.factory import chunk_name
from embodyrl.envs.maniskill import factory as maniskill
from embodyrl.envs.settings import RenderProfile
from embodyrl.errors import ConfigError
from embodyrl.plan import build, memory, rates
from embodyrl.plan import memory_limits as limits
from embodyrl.plan.config import load_config
from embodyrl.plan.rates import rates_file
from embodyrl.plan.schema import Config
from embodyrl.policies.flow.specs import PI05, SIZES_KEY, SMOLVLA, FlowSpec

GOLDEN = Path(__file__).parent / "dry_runs"
GPUS = {"1gpu": "0", "8gpu": "0,1,2,3,4,5,6,7"}
H100_MIB = 81559
STATISTICS = {"libero": "libero_10_no_noops", "maniskill": "maniskill"}


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Describe a machine with 96 cores, 900 GiB, a disk of 4 TiB, GPUs that render, and vLLM."""
    stub_nvidia_smi(tmp_path, monkeypatch, *of_size(*[H100_MIB] * 8))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "vllm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for module in (build, rates, command_facts):
        monkeypatch.setattr(module, "available_cores", lambda: 96)
    for module in (limits, command_facts, env_factory):
        monkeypatch.setattr(module, "available_bytes", lambda: 900 * 2**30)
    monkeypatch.setattr(command_facts, "_free_disk", lambda cfg: 2**42)


def vla(folder: Path, statistics: str) -> str:
    """Create a folder of the public 7B layout without weights, which a dry run does not open."""
    source = assets_dir() / "openvla_oft_tiny"
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text()) | {
        "image_sizes": [224, 224],
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "pad_token_id": 32000,
        "text_config": {"model_type": "llama", "vocab_size": 32064},
    }
    config.pop("embodyrl_init", None)
    (folder / "config.json").write_text(json.dumps(config))
    known = json.loads((folder / "dataset_statistics.json").read_text())
    (folder / "dataset_statistics.json").write_text(json.dumps({statistics: next(iter(known.values()))}))
    (folder / "model.safetensors").touch()
    return f"model.path={folder}"


def text(folder: Path) -> list[str]:
    """Create a folder with the sizes of Qwen2.5-1.5B, whose weight file is sparse, and rows."""
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    more = {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(sizes | more))
    (folder / "tokenizer_config.json").write_text("{}")
    shutil.copy(assets_dir() / "openvla_oft_tiny" / "tokenizer.json", folder)
    count = 1_543_714_304
    header = json.dumps({"all": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + 2 * count)
    rows = [{"question": "word " * 60 + str(i), "answer": f"#### {i}"} for i in range(400)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"model.path={folder}", f"data.path={folder}/rows.jsonl"]


def flow(folder: Path, spec: FlowSpec) -> str:
    """A folder of the public sizes of SmolVLA or pi0.5 that asks for random weights."""
    kind = "smolvla" if spec is SMOLVLA else "pi0"
    shutil.copy(assets_dir() / ("smolvla_tiny" if spec is SMOLVLA else "pi05_tiny") / "tokenizer.json", folder)
    settings = {SIZES_KEY: {"kind": kind, **asdict(spec)}, "embodyrl_init": "random"}
    (folder / "config.json").write_text(json.dumps(settings))
    return f"model.path={folder}"


def model_of(preset: str, folder: Path) -> list[str]:
    if preset.startswith("gsm8k"):
        return text(folder)
    for name, spec in (("smolvla", SMOLVLA), ("pi05", PI05)):
        if name in preset:
            return [flow(folder, spec)]
    return [vla(folder, STATISTICS[preset.partition("_")[0]])]


def config(preset: str, folder: Path, monkeypatch, *more: str, gl: str = "egl") -> Config:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPUS.get(preset.rpartition("_")[2], "0"))
    monkeypatch.setenv("MUJOCO_GL", gl)  # egl: a GPU that draws
    words = model_of(preset, folder)
    return load_config("train", [f"experiment={preset}", *words, f"runner.output_dir={folder}", *more])


def dry_run(preset: str, folder: Path, monkeypatch, *more: str) -> str:
    return describe(config(preset, folder, monkeypatch, *more)).replace(str(folder), "FOLDER") + "\n"


@pytest.mark.parametrize(
    "preset", ["libero_10_lora_1gpu", "libero_10_full_8gpu", "gsm8k_vllm_1gpu", "maniskill_ppo_1gpu"]
)
def test_preset_dry_run_matches_the_recorded_output(preset, tmp_path, monkeypatch):
    if preset.startswith("libero"):
        pytest.importorskip("libero.libero")
    # ManiSkill would build the task on a GPU; this is what it says on a CPU.
    monkeypatch.setattr(maniskill, "describe_in_subprocess", lambda cfg: PANDA)
    folder = tmp_path / "model"
    folder.mkdir()
    said = dry_run(preset, folder, monkeypatch)
    golden = GOLDEN / f"{preset}.txt"
    if os.environ.get("DRY_RUNS") == "write":
        golden.write_text(said)
    assert said == golden.read_text()


def test_small_gpu_error_suggests_settings(tmp_path, monkeypatch):
    """24 GB: keys at their minimum are not suggested, and software rendering frees the GPU memory of the simulators."""
    pytest.importorskip("libero.libero")
    small = ("actor.micro_batch_size=1", "actor.gradient_checkpointing=true", "launcher.env_workers=8")
    words = (*small, "env.train.total_num_envs=16", "env.eval.total_num_envs=16")
    stub_nvidia_smi(tmp_path, monkeypatch, ("0", "GPU-0", "24564", "24564", *H100[4:6], "NVIDIA GeForce RTX 4090"))
    with pytest.raises(ConfigError, match=r"the smallest GPU has only 24\.0 GiB free") as refused:
        dry_run("libero_10_lora_1gpu", tmp_path, monkeypatch, *words)
    advice = str(refused.value).partition("Try ")[2]
    assert re.match(
        r"MUJOCO_GL=osmesa, which renders on the CPU and frees \d\.\d GiB, launcher.env_workers below 8", advice
    )
    assert not any(key in advice for key in ("micro_batch_size", "gradient_checkpointing", "is_lora"))
    cfg = config("libero_10_lora_1gpu", tmp_path, monkeypatch, *words, gl="osmesa")
    assert "(RTX 4090): 110 TFLOP/s" in describe(cfg)


LARGER = ("env.train.total_num_envs=32", "env.eval.total_num_envs=32")


@pytest.mark.parametrize(
    ("preset", "workers"),
    [("libero_spatial_smolvla_1gpu", 32), ("libero_spatial_pi05_1gpu", 32), ("libero_10_lora_24gb", 16)],
)
def test_presets_of_24_gb_fit_24_and_48_gb_with_simulators(preset, workers, tmp_path, monkeypatch):
    pytest.importorskip("libero.libero")
    for most, words in ((22, ()), (44, (*LARGER, f"launcher.env_workers={workers}"))):
        plan = build.build_run_plan(config(preset, tmp_path, monkeypatch, *words), training=True)
        assert 0.6 * most * 2**30 < memory.fullest_gpu(plan, memory.plan_memory(plan)) < most * 2**30


def test_texture_memory_is_planned_for_the_tasks_that_fit_in_host_memory(tmp_path, monkeypatch):
    pytest.importorskip("libero.libero")
    planned = {}
    for gib in (900, 110):
        monkeypatch.setattr(env_factory, "available_bytes", lambda gib=gib: gib * 2**30)
        cfg = config("libero_10_lora_1gpu", tmp_path, monkeypatch)
        planned[gib] = memory.plan_memory(build.build_run_plan(cfg, training=True)).env_gpu
    assert planned == {900: 2_000_000_000, 110: 1_100_000_000}


def test_suggested_settings_for_a_language_model_fit_24_gb(tmp_path, monkeypatch):
    stub_nvidia_smi(tmp_path, monkeypatch, *of_size(24564))
    with pytest.raises(ConfigError, match=r"model\.is_lora=true with rollout\.backend=hf"):
        dry_run("gsm8k_vllm_1gpu", tmp_path, monkeypatch)
    assert "memory" in dry_run("gsm8k_vllm_1gpu", tmp_path, monkeypatch, "model.is_lora=true", "rollout.backend=hf")


@pytest.mark.parametrize(
    ("name", "speed"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA RTX A6000", "A6000"),
        ("Quadro P400", None),
    ],
)
def test_speed_table_is_found_by_gpu_name(name, speed, tmp_path, monkeypatch):
    stub_nvidia_smi(tmp_path, monkeypatch, (*H100[:6], name))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = rates._find_slowest_speed(Gpus(), {})
    assert (found and found.name) == speed


def test_measured_rates_replace_assumed_rates(tmp_path, monkeypatch):
    """Rates of another GPU, and incomplete ones, are not used."""
    pytest.importorskip("libero.libero")
    words = ("actor.micro_batch_size=8", "launcher.env_workers=64")
    assumed = dry_run("libero_10_lora_1gpu", tmp_path, monkeypatch, *words)
    assert "650 TFLOP/s in bfloat16" in assumed
    assert "simulators 625 chunks/s" in assumed, "all processes share a GPU that renders"
    report = tmp_path / "report.json"
    half = {"flops": 325e12, "slow_flops": 25e12, "bandwidth": 1.4e12}
    rates_file().parent.mkdir(parents=True, exist_ok=True)

    def keep(measured):
        entries = {
            name: {"rates": rates, "report": str(report), "day": "2026-01-02"} for name, rates in measured.items()
        }
        rates_file().write_text(json.dumps(entries))

    keep({"NVIDIA L4": half, H100[-1]: {"flops": 1.0}})
    assert dry_run("libero_10_lora_1gpu", tmp_path, monkeypatch, *words) == assumed
    chunk = chunk_name(RenderProfile.full, fast=True, on_gpu=True)
    keep({H100[-1]: half, chunk: {"chunk_s": 10.0}})
    measured = dry_run("libero_10_lora_1gpu", tmp_path, monkeypatch, *words)
    assert f"measured for each GPU ({H100[-1]}): 325 TFLOP/s in bfloat16, 1.4 TB/s" in measured
    assert "rates from FOLDER/report.json (2026-01-02), time of simulators from FOLDER/report.json" in measured
    assert "bound by simulators" in measured


NODES = "cluster.component_placement={env:0-1,rollout:0-1,actor:0-1}"
TWO_NODES = ("launcher.name=spread_launcher:SpreadLauncher", "cluster.num_nodes=2", NODES)


def test_memory_is_planned_per_node(tmp_path, monkeypatch):
    """16 ranks in two groups of 8, one on each node: a GPU has at most one rank and its share of env workers."""
    pytest.importorskip("libero.libero")
    ranks = ("actor.fsdp.size=16", "actor.fsdp.shard_size=8")
    cfg = config("libero_10_full_8gpu", tmp_path, monkeypatch, *TWO_NODES, *ranks)
    plan = build.build_run_plan(cfg, training=True)
    assert [plan.policy_node(rank) for rank in range(16)] == [0] * 8 + [1] * 8
    assert plan.devices.policies == (*"01234567", *"01234567")
    assert (len(plan.env_workers), plan.env_workers_per_node) == (192, 96)
    assert [plan.env_node(number) for number in range(4)] == [0, 1, 0, 1]
    said = describe(cfg)
    assert "for each of 16 policy processes" in said
    needed = memory.plan_memory(plan)
    assert memory.fullest_gpu(plan, needed) == needed.policy + 12 * needed.env_gpu
    with pytest.raises(ConfigError, match="96 env workers"):
        limits.require_memory(plan, replace(needed, env_worker=20 * 2**30))


def test_rank_count_covers_all_nodes(tmp_path, monkeypatch):
    pytest.importorskip("libero.libero")
    cfg = config("libero_10_full_8gpu", tmp_path, monkeypatch, *TWO_NODES, "actor.fsdp.size=-1")
    assert build.count_ranks(cfg) == 16
    one = (*TWO_NODES[:2], "cluster.component_placement={env:0-1,rollout:1,actor:1}")
    plan = build.build_run_plan(config("libero_10_full_8gpu", tmp_path, monkeypatch, *one), training=True)
    assert (plan.ranks, {plan.policy_node(rank) for rank in range(8)}) == (8, {1})


def test_run_that_exceeds_gpu_memory_is_rejected(tmp_path, monkeypatch):
    again = ("actor.gradient_checkpointing=false", "actor.micro_batch_size=32")
    with pytest.raises(ConfigError, match=r"needs about 1\d\d\.\d GiB.* the smallest GPU has only 79\.6 GiB"):
        dry_run("gsm8k_vllm_1gpu", tmp_path, monkeypatch, *again)


@pytest.mark.parametrize(("gib", "when"), [(80, "step"), (40, "micro_batch")])
def test_gradient_sync_setting_depends_on_available_memory(gib, when, tmp_path, monkeypatch):
    pytest.importorskip("libero.libero")
    monkeypatch.setattr(Gpus, "free", gib * 2**30)
    cfg = config("libero_10_full_8gpu", tmp_path, monkeypatch)
    plan = memory.plan_memory(build.build_run_plan(cfg, training=True))
    assert plan.gradient_sync == when
    assert plan.policy < gib * 2**30


def test_a_dry_run_starts_nvidia_smi_once(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    stub_nvidia_smi(tmp_path, monkeypatch, *of_size(H100_MIB), more=f"echo >> {tmp_path}/starts")
    assert "predicted" in dry_run("gsm8k_vllm_1gpu", folder, monkeypatch)
    assert len((tmp_path / "starts").read_text()) == 1


def test_printed_memory_parts_sum_to_the_printed_total():
    for file in GOLDEN.glob("*.txt"):
        line = re.search(r"memory +([\d.]+) GiB for each of \d+ policy processes at its peak: (.*)", file.read_text())
        assert line is not None, file
        parts = [float(part.split()[-1]) for part in line[2].partition(";")[0].split(" + ")]
        assert sum(parts) == pytest.approx(float(line[1])), file


def test_dry_run_ends_with_a_verdict():
    assert describe(load_config("train", [])).splitlines()[-1].startswith("  verdict      fits on this machine")
