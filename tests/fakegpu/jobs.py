"""A policy process of a real config on the fake GPU, up to its second update, and its memory plan.

`run` imports torch, so it must be called after `fakegpu` is loaded. Config, run_plan, arena, `PolicyHost` and requests
are those of embodyrl; only the process group is fake, and this process is its first rank.
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

GIB = 2**30
H100 = 81559 * 2**20
OFT_7B = {
    "image_sizes": [224, 224],
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "pad_token_id": 32000,
    "text_config": {"model_type": "llama", "vocab_size": 32064},
}
QWEN = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}


FLOWS = ("smolvla", "pi05")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One policy process and its config."""

    name: str
    model: str
    """7b, tiny, 0.5b, 1.5b, smolvla or pi05."""
    words: tuple[str, ...] = ()
    lora: bool = False
    """Set in code, because overrides reject adapters on random weights, and the fake GPU has no others."""
    act: int = 4
    """Number of samples of the inference."""
    train: int = 2
    """Number of samples of the second update; the first update has one per rank."""
    saves: bool = False
    """True: write a checkpoint and load it."""
    layers: int | None = None
    """Number of layers of the language model and of each tower (7B: one more, the last is unused); None: all."""


@dataclass
class Result:
    """Measurements of a job."""

    planned: dict[str, int] = field(default_factory=dict)
    sleeps: bool = False
    """True if vLLM has its memory only while acting."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Peak memory in bytes by phase."""
    phases: dict[str, dict[str, Any]] = field(default_factory=dict)

    def measured(self) -> int:
        """Peak memory of all phases in bytes."""
        return max(self.peaks.values())


def write_oft(folder: Path, *, layers: int | None, tiny: bool) -> None:
    """Write a checkpoint folder with random initial weights, with public or included sizes."""
    from embodyrl.config.paths import assets_dir
    from embodyrl.policies.openvla_oft import config as oft_config

    source = assets_dir() / "openvla_oft_tiny"
    folder.mkdir(exist_ok=True)
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text()) | ({} if tiny else OFT_7B)
    if layers is not None:
        config["text_config"] = config["text_config"] | {"num_hidden_layers": layers}
        known = json.loads((source / "tiny_vit_specs.json").read_text()) if tiny else oft_config._KNOWN_VITS
        towers = {name: spec | {"depth": layers + (not tiny)} for name, spec in known.items()}
        (folder / "tiny_vit_specs.json").write_text(json.dumps(towers))
    (folder / "config.json").write_text(json.dumps(config))


def write_flow(folder: Path, model: str, layers: int | None) -> None:
    """Write a folder of the public SmolVLA or pi0.5 sizes that asks for random weights."""
    from dataclasses import asdict

    from embodyrl.config.paths import assets_dir
    from embodyrl.policies.flow.specs import PI05, SIZES_KEY, SMOLVLA

    spec = SMOLVLA if model == "smolvla" else PI05
    if layers is not None:
        parts = {name: replace(getattr(spec, name), depth=layers) for name in ("vision", "language", "expert")}
        spec = replace(spec, **parts)
    folder.mkdir(exist_ok=True)
    shutil.copy(assets_dir() / f"{model}_tiny" / "tokenizer.json", folder)
    kind = "smolvla" if model == "smolvla" else "pi0"
    config = {SIZES_KEY: {"kind": kind, **asdict(spec)}, "embodyrl_init": "random"}
    (folder / "config.json").write_text(json.dumps(config))


def write_text(folder: Path, model: str, layers: int | None) -> None:
    """Write a folder of the public Qwen2.5 sizes whose weight file is only a header, because only sizes are read."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from embodyrl.config.paths import assets_dir

    sizes = QWEN[model] | ({} if layers is None else {"num_hidden_layers": layers})
    config = Qwen2Config(
        vocab_size=151936, num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=32768, **sizes
    )
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(assets_dir() / "causal_lm_tiny").save_pretrained(folder)
    shutil.copy(assets_dir() / "openvla_oft_tiny" / "tokenizer.json", folder)  # of words, which prompts are measured by
    with torch.device("meta"):
        net = Qwen2ForCausalLM(config)
    header, end = {}, 0
    for name, p in net.named_parameters():
        header[name] = {"dtype": "BF16", "shape": list(p.shape), "data_offsets": [end, end + 2 * p.numel()]}
        end += 2 * p.numel()
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)  # sparse


def config_of(job: Job, folder: Path) -> Any:
    """Return the config of a job whose model is in `folder`."""
    from embodyrl.plan.config import load_config

    if "rollout.backend=vllm" in job.words:
        (folder / "vllm.py").touch()
        sys.path.insert(0, str(folder))
    if job.model in QWEN:
        write_text(folder, job.model, job.layers)
        rows = [{"question": f"{i} + 2 = ?", "answer": f"#### {i + 2}"} for i in range(200)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = (
            "env=text/gsm8k",
            "model=causal_lm",
            f"data.path={folder}/rows.jsonl",
            "env.train.total_num_envs=8",
        )
    elif job.model in FLOWS:
        write_flow(folder, job.model, job.layers)
        words = (
            *("env=tabletop", f"model={job.model}_libero", "env.train.max_episode_steps=8"),
            *("env.init_params.camera_heights=224", "env.init_params.camera_widths=224"),
            "env.init_params.camera_names=[front,wrist]",
            "env.train.total_num_envs=8",
        )
    else:
        write_oft(folder, layers=job.layers, tiny=job.model == "tiny")
        # One camera of 224 pixels.
        words = (
            *("env=tabletop", "model=openvla_oft", "env.train.max_episode_steps=8"),
            *("env.init_params.camera_heights=224", "env.init_params.camera_widths=224"),
            *("env.train.total_num_envs=8", "model.unnorm_key=libero_10"),
        )
    epochs = f"algorithm.rollout_epoch={max(1, job.train // 8)}"  # as many samples as the second update has
    places = (
        epochs,
        f"model.path={folder}",
        f"runner.output_dir={folder}/runs",
        "launcher=local",
        "launcher.env_workers=1",
    )
    cfg = load_config("train", [*words, *places, *job.words])
    return cfg.updated({"model.is_lora": True}) if job.lora else cfg


@contextmanager
def one_of(world: int) -> Iterator[None]:
    """Act as the first of n ranks whose collectives have no other participants."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import _disable_current_modes

    from embodyrl.learners import fsdp as ranks

    join, mesh, exchange = ranks._join_process_group, ranks.init_device_mesh, ranks.ShardedRanks.gather_metrics

    def real_mesh(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return mesh(*args, **kwargs)

    def joined(rank_info: Any, device: str) -> None:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())

    ranks._join_process_group, ranks.init_device_mesh = joined, real_mesh  # type: ignore[assignment]
    ranks.ShardedRanks.gather_metrics = lambda self, parts: parts  # what the others say would be read, and is not there
    try:
        yield
    finally:
        ranks._join_process_group, ranks.init_device_mesh, ranks.ShardedRanks.gather_metrics = join, mesh, exchange
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def fake_text(job: Job, prompt: int) -> Iterator[None]:
    """Replace language models by models without data, and prompts by n tokens."""
    if job.model not in QWEN:
        yield
        return
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen2ForCausalLM

    from embodyrl.config.paths import resolve_asset
    from embodyrl.policies.causal_lm import policy, prompts

    real = policy.load, prompts.PromptReader._encode

    def load(folder: Path, *, seed: int | None, dtype: torch.dtype, reads_images: bool) -> tuple[Any, Any]:
        with torch.device("meta"):
            net: Any = Qwen2ForCausalLM(AutoConfig.from_pretrained(folder)).to(dtype)
        net = net.to_empty(device="cpu")
        net.tie_weights()
        return net, AutoTokenizer.from_pretrained(resolve_asset("assets/causal_lm_tiny"))

    def encode(self: Any, instruction: str, bits: bytes, shape: tuple[int, ...]) -> prompts.Prompt:
        return prompts.Prompt([7] * prompt)

    policy.load, prompts.PromptReader._encode = load, encode  # type: ignore[assignment]
    try:
        yield
    finally:
        policy.load, prompts.PromptReader._encode = real  # type: ignore[assignment]


def fill(arena: Any, count: int, policy: Any, task: str) -> Any:
    """Fill records of `count` episodes of one chunk step with different advantages."""
    from embodyrl.channels.layout import Record, encode_instruction

    record_refs = []
    for number in range(count):
        record_ref = arena.allocate()
        record_refs.append(record_ref)
        with arena.write(record_ref) as record:
            said = arena[Record.instruction]
            said[record] = encode_instruction(task, said.shape[1])
            arena[Record.tokens][record] = getattr(getattr(policy, "_config", None), "action_vocab_start", 7)
            arena[Record.valid][record] = True
            arena[Record.logprob][record] = -1.0
            arena[Record.advantage][record] = 1.0 if number % 2 else -1.0
            arena[Record.cost][record] = 1
    return record_refs


def run(job: Job, folder: Path) -> Result:
    """Build, act, score, update twice, save and load."""
    from embodyrl.channels.arena import Arena
    from embodyrl.devices import Gpus
    from embodyrl.plan import memory
    from embodyrl.plan.build import build_run_plan
    from embodyrl.scheduler.start import build_policy_init

    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    run_plan = build_run_plan(config_of(job, folder), training=True)
    arena = Arena.create(run_plan.layout, max(job.act, job.train) + 2)
    init = build_policy_init(run_plan, arena, None)
    init = replace(init, acts=not run_plan.is_disaggregated, rank_info=replace(init.rank_info, world=run_plan.ranks))
    result = Result()
    plan = memory.plan_memory(run_plan)
    sizes = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    result.planned = {name: size for name, size in sizes.items() if type(size) is int} | {"policy": plan.policy}
    result.sleeps = plan.sleeps
    if plan.engine:
        Gpus.free = H100
    result.planned["share"] = int(plan.engine_memory_fraction * H100) if plan.engine else 0
    try:
        prompt = run_plan.policy_costs.sample_tokens - run_plan.policy.num_action_chunks
        with one_of(run_plan.ranks), fake_text(job, prompt):
            _live(job, run_plan, arena, init, result, folder)
    finally:
        arena.close()
    return result


def _live(job: Job, run_plan: Any, arena: Any, init: Any, result: Result, folder: Path) -> None:
    from fakegpu import FakeGpu

    from embodyrl.channels.messages import InferRequest, LoadRequest, SaveRequest, ScoreRequest, UpdateRequest
    from embodyrl.workers.policy_host import PolicyHost

    with FakeGpu(scalar=1.0) as gpu:

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            gpu.reset()
            yield
            result.peaks[name] = gpu.peak
            result.phases[name] = {
                "live": gpu.live,
                "peak": gpu.peak,
                "kernels": gpu.kernels,
                "tflop": gpu.flops / 1e12,
                "gb": gpu.moved / 1e9,
                "roofline_ms": gpu.seconds * 1e3,
                "waits": gpu.syncs,
                "copies": gpu.h2d,
                "wait_places": dict(gpu.sync_places),
            }
            if os.environ.get("FAKEGPU_TOP"):
                print(gpu.report(name, int(os.environ["FAKEGPU_TOP"])))

        with phase("build"):
            host = PolicyHost(init)
        policy = host.policy
        text = job.model in QWEN
        record_refs = fill(arena, max(job.act, job.train), policy, run_plan.env.tasks[0])
        gpu.scalar = 0.0 if text else 1.0  # no reply has ended
        if init.acts and job.act:
            wanted = {
                "record_refs": record_refs[: job.act],
                "noise_seeds": range(job.act),
                "chunk_indices": [0] * job.act,
            }
            # Where forward passes are recorded, the second one is a replay.
            for name in ("act", "act again")[: 1 + run_plan.cfg.model.uses_cuda_graphs]:
                with phase(name):
                    list(host.handle(InferRequest(**wanted, greedy=False, version=0)))
        fill_again(arena, policy)
        gpu.scalar = float(policy.spec.num_action_chunks) if text else 1.0  # tokens of the longest reply
        if job.train:
            asked = tuple(record_refs[: job.train])
            if run_plan.algorithm.needs_reference:
                with phase("reference"):
                    list(host.handle(ScoreRequest(record_refs=asked)))
            for number, part in enumerate((asked[: run_plan.ranks], asked)):  # moments come with the first step
                with phase(f"update {number}"):
                    list(host.handle(UpdateRequest(step=number, record_refs=part, episode=tuple(range(len(part))))))
        for name, request in (("save", SaveRequest), ("load", LoadRequest)) if job.saves else ():
            with phase(name):
                (done,) = host.handle(request(folder=f"{folder}/saved"))
                assert not done.error, done.error
        host.close()


def fill_again(arena: Any, policy: Any) -> None:
    """Restore the records that acting without data has overwritten."""
    from embodyrl.channels.layout import Record

    arena[Record.tokens][:] = getattr(getattr(policy, "_config", None), "action_vocab_start", 7)
    arena[Record.cost][:] = 1
