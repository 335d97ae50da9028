"""Upload to the hub with `embodyrl push`, and download by `model.path` and `data.path`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN, Hub
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file, save_file
from test_dataset_roundtrip import demonstration, write
from toy_runs import TOY_COLLECT, train_toy

from embodyrl.api.acting import load_policy
from embodyrl.cli.main import main
from embodyrl.commands.collect import collect
from embodyrl.commands.sft import sft
from embodyrl.config.paths import resolve_asset
from embodyrl.data.checks import check_layout
from embodyrl.data.reader import load_demonstrations
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.plan.saved import save_config

POLICY = Path(__file__).parents[2] / "assets" / "flow_small_tabletop"
FLOW = ("env=tabletop", "model=flow_small")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Start a hub server with an empty cache and a logged-in user; large files are transferred as with git LFS."""
    hub = Hub()
    settings = {"ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": True}
    address = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {**settings, "HUGGINGFACE_CO_URL_TEMPLATE": address, "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    yield hub
    hub.shutdown()
    hub.server_close()


def pushed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(["push", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["pinned"]


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config("eval", words)
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pushed_run_is_downloaded_with_equal_weights(hub: Hub, tmp_path: Path, capsys) -> None:
    run = train_toy(tmp_path / "runs", "runner.max_steps=1", "runner.save_interval=1")
    first = pushed(capsys, run, "me/toy", "trust=true")
    assert not list(run.glob(".push*"))
    cfg = load_config("eval", ["env=libero_10", "model=openvla_oft_tiny", "model.path=me/toy"])
    assert cfg.model.path == first, "the config of the run names the commit"
    loaded = load_file(resolve_asset(cfg.model.path) / "model.safetensors")
    kept = load_file(run / "checkpoints/step_000001/policy/model.safetensors")
    assert loaded.keys() == kept.keys()
    assert all(torch.equal(loaded[key], kept[key]) for key in kept)
    assert {name for _, name in hub.repositories} == {"me/toy"}


def test_pushed_card_names_the_initial_weights(hub: Hub, tmp_path: Path, capsys) -> None:
    words = ("runner.max_steps=1", "runner.save_interval=1")
    policy = train_toy(tmp_path / "runs", *words) / "checkpoints/step_000001/policy"
    begun = train_toy(tmp_path / "runs", *words, f"ckpt={policy}", name="second")
    first = pushed(capsys, begun, "me/toy", "trust=true")
    assert f"| base model | {policy} |" in read(hub, first)
    assert "base_model" not in read(hub, first).split("---")[1], "the hub wants no folder of this machine there"
    again = train_toy(tmp_path / "runs", *words, f"ckpt={first}", name="third")
    assert "\nbase_model: me/toy\n" in read(hub, pushed(capsys, again, "me/more", "trust=true")).split("---")[1]


def test_pushed_card_lists_task_data_and_results(hub: Hub, tmp_path: Path, capsys) -> None:
    collected = tmp_path / "demos"
    few = ("launcher=inline", "runner.logger.backends=[jsonl]", "collect.episodes=3")
    collect(load_config("collect", [*TOY_COLLECT, f"collect.out={collected}", f"runner.output_dir={tmp_path}/r", *few]))
    data = pushed(capsys, collected, "me/demos")
    words = ("model.num_action_chunks=4", "model.use_proprio=false", "model.num_images_in_input=1")
    small = ("actor.global_batch_size=4", "actor.micro_batch_size=4", "runner.max_steps=1", *few[:2])
    run = sft(load_config("sft", [f"data.path={data}", f"runner.output_dir={tmp_path}/r", *words, *small])).run
    learned = pushed(capsys, run, "me/learned", "trust=true")
    head = ModelCard(read(hub, learned)).data
    assert (head.library_name, head.pipeline_tag, head.datasets) == ("embodyrl", "robotics", ["me/demos"])
    assert head.eval_results is None
    trained = train_toy(
        tmp_path / "runs", "runner.max_steps=1", "runner.save_interval=1", "runner.val_check_interval=1"
    )
    head = ModelCard(read(hub, pushed(capsys, trained, "me/toy", "trust=true"))).data
    table = json.loads((trained / "eval/step_000001/eval.json").read_text())
    assert head.eval_results[-1].dataset_config == "overall"
    assert head.eval_results[-1].metric_type == "success_rate"
    assert head.eval_results[-1].metric_value == pytest.approx(table["overall"]["success_once"], abs=1e-4)
    assert len(head.eval_results) == len(table["tasks"]) + 1


def test_links_to_other_folders_are_not_pushed(hub: Hub, tmp_path: Path, capsys) -> None:
    (tmp_path / "secret").write_text("PRIVATE KEY")
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    assert main(["push", str(folder), "me/toy"]) != 0
    assert "'notes.txt' is outside the folder" in capsys.readouterr().err
    assert not hub.repositories


def read(hub: Hub, pinned: str) -> str:
    name, _, commit = pinned.partition("@")
    return hub.repositories["model", name].commits[commit]["README.md"].decode()


def test_pinned_commit_loads_offline_and_unchanged(hub: Hub, tmp_path: Path, capsys) -> None:
    first = pushed(capsys, POLICY, "me/flow")
    cfg = load_config("eval", [*FLOW, "model.path=me/flow"])
    other = tmp_path / "other"
    other.mkdir()
    for file in POLICY.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tensors = load_file(POLICY / "model.safetensors")
    save_file({key: torch.zeros_like(tensor) for key, tensor in tensors.items()}, other / "model.safetensors")
    second = pushed(capsys, other, "me/flow")
    assert first != second
    save_config(cfg, tmp_path / "config.yaml")
    sent = len(hub.sent)
    assert load_saved_config(tmp_path / "config.yaml", [], command="eval").model.path == first
    assert len(hub.sent) == sent, "a fetched commit is not asked for again"
    assert load_config("eval", [*FLOW, f"model.path={first}"]).model.path == first
    assert load_config("eval", [*FLOW, "model.path=me/flow@main"]).model.path == second
    acts = [load_policy(name, *FLOW, device="cpu") for name in (POLICY, first)]
    states = [policy.policy.module.state_dict() for policy in acts]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_interrupted_download_resumes(hub: Hub, monkeypatch, capsys) -> None:
    pushed(capsys, POLICY, "me/flow")
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    size, hub.cut_after = (POLICY / "model.safetensors").stat().st_size, 1_000_000
    cfg = load_config("eval", [*FLOW, "model.path=me/flow"])
    sent = [count for name, count in hub.sent if name == "model.safetensors"]
    assert sent == [1_000_000, size - 1_000_000]
    found = resolve_asset(cfg.model.path) / "model.safetensors"
    assert found.read_bytes() == (POLICY / "model.safetensors").read_bytes()


def test_code_and_pickle_files_are_not_downloaded(hub: Hub, capsys, tmp_path: Path) -> None:
    pushed(capsys, POLICY, "me/flow")
    files = hub.repositories["model", "me/flow"].commits[hub.repositories["model", "me/flow"].refs["main"]]
    files |= {"modeling_evil.py": b"raise SystemExit", "pytorch_model.bin": b"cos\nsystem\n", "x.pkl": b"."}
    folder = resolve_asset(load_config("eval", [*FLOW, "model.path=me/flow"]).model.path)
    assert {file.name for file in folder.iterdir()} == {file.name for file in POLICY.iterdir()}


def test_pushed_demonstrations_are_downloaded_unchanged(hub: Hub, tmp_path: Path, capsys) -> None:
    write(tmp_path / "mine", [demonstration(n) for n in range(4)])
    pinned = pushed(capsys, tmp_path / "mine", "me/demos")
    cfg = load_config("sft", ["data.path=me/demos", "model=openvla_oft_tiny"])
    assert cfg.data.path == pinned
    assert check_layout(resolve_asset(pinned)) == []
    ours, theirs = load_demonstrations(tmp_path / "mine"), load_demonstrations(resolve_asset(pinned))
    assert (ours.images == theirs.images).all()
    assert (ours.action == theirs.action).all()
    assert hub.repositories["dataset", "me/demos"].refs["v3.0"] == pinned.partition("@")[2], "where lerobot looks"


def test_text_dataset_on_the_hub_is_detected(hub: Hub, tmp_path: Path) -> None:
    from hub_server import Repository

    rows = b'{"prompt": "1+1=", "answer": "2"}\n' * 4
    hub.repositories["dataset", "me/sums"] = Repository({"a" * 40: {"train.jsonl": rows}}, {"main": "a" * 40})
    cfg = load_config("sft", ["data.path=me/sums", "model=causal_lm_tiny", "data.prompt_key=prompt"])
    assert cfg.data.path == "me/sums@" + "a" * 40


def test_missing_repository_is_a_one_line_error(hub: Hub, monkeypatch, capsys, tmp_path: Path) -> None:
    assert "model.path=me/none: no such folder here, and the hub" in refusal(*FLOW, "model.path=me/none")
    pushed(capsys, POLICY, "me/flow")
    assert "no such repository or revision" in refusal(*FLOW, "model.path=me/flow@v9")
    assert "unknown" in refusal(*FLOW, "model.path=me/flow", "modle.path=x"), "nothing is fetched for a wrong key"
    assert {name for name, _ in hub.sent} <= {"embodyrl_config.yaml"}, "no weights"
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    assert main(["push", str(POLICY), "me/mine"]) == 2
    assert "HF_TOKEN" in capsys.readouterr().err
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in refusal(*FLOW, "model.path=me/flow")
    assert main(["push", str(POLICY), "me/mine"]) == 2
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "cannot be reached" in refusal(*FLOW, "model.path=me/flow")


def test_local_paths_are_not_looked_up_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "demos").mkdir()
    assert load_config("eval", [*FLOW, "model.path=demos/none"]).model.path == "demos/none"
    assert load_config("eval", [*FLOW, "model.path=runs/none"]).model.path == "runs/none"
