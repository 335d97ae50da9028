"""Rounds of RECAP with real workers: kill and resume, the report, and the exported policy."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from toy_runs import TOY

from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.cli.recap import recap
from embodyrl.commands.collect import collect
from embodyrl.commands.evaluate import evaluate
from embodyrl.commands.export import export
from embodyrl.commands.recap_arguments import read_arguments
from embodyrl.commands.sft import sft
from embodyrl.data.cards import CARD_PATH, read_card
from embodyrl.data.recap.report import REPORT_JSON
from embodyrl.errors import ConfigError, EmbodyError, Interrupted
from embodyrl.monitor.history import read_episodes
from embodyrl.plan.config import load_config
from embodyrl.plan.saved import find_ckpt_config

ENV = ("env.kwargs.tasks=2", "env.kwargs.goal=2.6", "env.train.max_episode_steps=8", "env.eval.max_episode_steps=8")
QUIET = ("launcher=inline", "runner.logger.backends=[jsonl]")
SMALL = ("model.num_action_chunks=2", "model.num_images_in_input=0", "data.image_aug=false", "actor.micro_batch_size=8")
PLACE = tuple(word for word in TOY if word.startswith("env"))
INTERRUPTING = """
import os, signal
from embodyrl.monitor import Monitor

class Interrupting(Monitor):
    prompt = True

    def log(self, step, metrics):
        if step:
            os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Collect demonstrations and train initial weights."""
    folder = tmp_path_factory.mktemp("start")
    words = [*PLACE, *ENV, *QUIET, f"runner.output_dir={folder}", f"collect.out={folder}/demos"]
    collect(load_config("collect", [*words, "collect.episodes=4"]))
    learned = ["model=flow_small", *SMALL, *QUIET, f"data.path={folder}/demos", f"runner.output_dir={folder}"]
    few = ["runner.max_steps=2", "actor.global_batch_size=8", "runner.experiment_name=start"]
    sft(load_config("sft", [*learned, *few, "runner.val_check_interval=-1"]))
    return folder


def words(start: Path, out: Path, *more: str) -> list[str]:
    few = ("collect.episodes=4", "runner.max_steps=11", "actor.global_batch_size=8", "recap.value_steps=3")
    shown = ("eval.episodes=4", "recap.value_batch_size=16", "recap.rounds=1", "runner.val_check_interval=-1")
    policy = f"model.path={start}/start/checkpoints/step_000002/policy"
    return [*PLACE, "model=flow_small", *ENV, *QUIET, *SMALL, policy, f"data.path={start}/demos", *few, *shown,
            f"recap.out={out}", *more]  # fmt: skip


def run(arguments: list[str]) -> None:
    assert recap(argparse.Namespace(words=arguments, config_dir=[], json=False)) == 0


@pytest.mark.integration
def test_a_policy_without_instructions_is_refused_before_the_first_episode(start: Path, tmp_path: Path) -> None:
    policy = ("model=act", "model.path=assets/act", "model.num_action_chunks=2", f"data.path={start}/demos")
    with pytest.raises(ConfigError, match="'act' has no instruction input"):
        run([*PLACE, *ENV, *QUIET, *policy, f"recap.out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def weights(folder: Path) -> bytes:
    return (CheckpointStore(folder / "checkpoints").path(11) / "policy" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_interrupted_rounds_resume_with_equal_labels_and_weights(start: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "interrupting.py").write_text(INTERRUPTING)
    monkeypatch.syspath_prepend(tmp_path)
    one, other = tmp_path / "one", tmp_path / "other"
    run(words(start, one))
    with pytest.raises(Interrupted, match="to continue all rounds, run the same command again"):
        run(words(start, other, "runner.logger.backends=[interrupting:Interrupting]"))
    assert not (other / "recap.json").exists()
    run(words(start, other))
    assert pq.read_table(one / "labels_1.parquet").equals(pq.read_table(other / "labels_1.parquet"))
    assert weights(one / "round_1") == weights(other / "round_1")
    found = json.loads((one / REPORT_JSON).read_text())
    assert [row["number"] for row in found["rounds"]] == [0, 1]
    assert found["rounds"][1]["values"]["episodes"] == 8
    assert 0 < found["rounds"][1]["values"]["forced_frames"] < found["rounds"][1]["values"]["frames"]
    assert [command.split()[1] for command in found["commands"]] == ["eval", "collect", "sft", "eval"]
    before = {path: path.stat().st_mtime_ns for path in one.rglob("*.safetensors")}
    run(words(start, one))
    assert {path: path.stat().st_mtime_ns for path in one.rglob("*.safetensors")} == before
    with pytest.raises(ConfigError, match=r"labels_1.parquet was written with recap.positive_share=0.3\. Use"):
        run(words(start, one, "recap.positive_share=0.5"))
    for changed in ("actor.optim.lr=0.5", "model.num_steps=3", "objective.label_dropout=0.1", "runner.max_steps=10"):
        name = changed.partition("=")[0].replace(".", r"\.")
        with pytest.raises(ConfigError, match=rf"round_(1|0_eval) was created with {name}=.*choose another recap\.out"):
            run(words(start, one, changed))
    with pytest.raises(ConfigError, match=r"round_0_eval was created with eval\.episodes=4"):
        run(words(start, one, "eval.episodes=6"))
    run(words(start, one, "actor.micro_batch_size=4", "runner.logger.backends=[]"))
    assert {path: path.stat().st_mtime_ns for path in one.rglob("*.safetensors")} == before
    _check_export(one / "round_1", tmp_path)


def _check_export(learned: Path, tmp_path: Path) -> None:
    """The exported folder is a plain checkpoint that acts with suffix and guidance."""
    folder = export(learned, 11, tmp_path / "out", overrides=[])
    rule = json.loads((folder / "advantage.json").read_text())
    assert rule == {"suffix": "Advantage: positive", "guidance": 1.0}
    shared = [*ENV[:2], ENV[3], *QUIET, "eval.episodes=4", f"runner.output_dir={tmp_path}/evals"]
    model = ["model=flow_small", *SMALL[:2], f"model.path={folder}"]
    rows = [
        read_episodes(evaluate(cfg, overrides=[]).folder / "episodes.jsonl")
        for cfg in (
            load_config("eval", [f"ckpt={learned}", *PLACE, *shared], base=find_ckpt_config([f"ckpt={learned}"])),
            load_config("eval", [*model, *PLACE, *shared, "runner.experiment_name=exported"]),
        )
    ]
    assert [r.to_json() | {"seconds": 0} for r in rows[0]] == [r.to_json() | {"seconds": 0} for r in rows[1]]


@pytest.mark.integration
def test_recap_rejects_data_with_other_cameras(start: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(start / "demos", other)
    card = read_card(other)
    cameras = replace(card.env.cameras, names=("wrist",))
    (other / CARD_PATH).write_text(replace(card, env=replace(card.env, cameras=cameras)).to_json())
    with pytest.raises(EmbodyError, match=r"episodes_1 and .*other differ in cameras .*'front'.*'wrist'.*data\.path"):
        run(words(start, tmp_path / "out", f"data.path={other}"))


def _refused(*more: str) -> Callable[[], object]:
    return lambda: read_arguments(["model=flow_small", "model.path=x", "data.path=d", "recap.out=o", *more])


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("collect.filter=success", "all episodes are kept"),
        ("ckpt=runs/x", r"model\.path=FOLDER"),
        ("recap.positive_share=1", "positive_share"),
        ("recap.nonsense=1", "nonsense"),
    ],
)
def test_keys_that_recap_sets_itself_are_refused(word: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        _refused(word)()


def test_arguments_are_passed_to_the_stages_that_use_them() -> None:
    found = read_arguments(
        ["env=tabletop", "model=flow_small", "model.path=x", "data.path=d", "recap.out=o", "seed=3", "actor.optim.lr=1",
         "env.train.task_ids=[0]", "eval.episodes=3", "runner.max_steps=5"]
    )  # fmt: skip
    assert found.seed == 3
    assert set(found.by_stage["sft"]) == {"data.path=d", "seed=3", "actor.optim.lr=1", "runner.max_steps=5"}
    assert set(found.by_stage["collect"]) == {"env=tabletop", "seed=3", "env.train.task_ids=[0]"}
    assert set(found.by_stage["eval"]) == {"env=tabletop", "seed=3", "eval.episodes=3"}
    assert np.array_equal(found.model, ["model=flow_small", "model.path=x"])
