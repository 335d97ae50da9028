"""DAgger with real workers: executed actions, recorded labels and training rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from toy_runs import TOY_COLLECT

from embodyrl.cli.dry_run import describe
from embodyrl.commands.collect import collect
from embodyrl.commands.dagger import dagger
from embodyrl.commands.export import export
from embodyrl.data.reader import load_demonstrations
from embodyrl.data.tables import read_episodes
from embodyrl.errors import ConfigError, Interrupted
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config

TASKS = ("env.kwargs.tasks=2", "env.kwargs.goal=2.6", "env.train.max_episode_steps=8")
QUIET = ("launcher=inline", "runner.logger.backends=[jsonl]")


def configure(command: str, folder: Path, *words: str):
    cfg = load_config(command, [*TOY_COLLECT, *TASKS, *QUIET, f"runner.output_dir={folder}/runs", *words])
    check_components(cfg)
    return cfg


def test_dagger_executes_policy_actions_and_records_expert_labels(tmp_path: Path) -> None:
    out = tmp_path / "labeled"
    words = ("model=random", "collect.labels=expert", "collect.filter=all", "eval.sampling_params.do_sample=true")
    collect(configure("collect", tmp_path, *words, f"collect.out={out}", "collect.episodes=4"))
    demos = load_demonstrations(out)
    for row, (start, stop) in zip(read_episodes(out), zip(demos.start, demos.stop, strict=True), strict=True):
        sign = 1.0 if row["embodyrl/task_id"] == 0 else -1.0
        np.testing.assert_array_equal(demos.action[start:stop, 0], 0.5 * sign)
        # The expert would have moved by the same amount in every step.
        assert np.ptp(np.diff(demos.state[start:stop, 0])) > 0.1


@pytest.mark.parametrize("place", ["data.path", "data.more", "data.val_path"])
def test_dagger_rejects_mismatched_data_before_the_first_round(tmp_path: Path, place: str) -> None:
    for name in ("demos", "other"):
        collect(configure("collect", tmp_path, f"collect.out={tmp_path}/{name}", "collect.episodes=4"))
    card = tmp_path / "other" / "meta" / "embodyrl.json"
    card.write_text(card.read_text().replace('"image_rotation_deg": 0', '"image_rotation_deg": 180'))
    other = f"[{tmp_path}/other]" if place == "data.more" else f"{tmp_path}/other"
    words = (f"{place}={other}",)
    cfg = learning(tmp_path, *words)
    for act in (dagger, describe):
        with pytest.raises(ConfigError, match=r"other (d|and env).*image_rotation_deg \(180 and 0\)"):
            act(cfg)
    assert not (tmp_path / "rounds").exists()


def test_dry_run_describes_the_rounds(tmp_path: Path) -> None:
    collect(configure("collect", tmp_path, f"collect.out={tmp_path}/demos", "collect.episodes=4"))
    assert "rounds" in describe(learning(tmp_path, "dagger.rounds=2"))
    with pytest.raises(ConfigError, match="is not a folder"):
        describe(learning(tmp_path, f"data.path={tmp_path}/nowhere"))


INTERRUPTING = """
import os, signal
from embodyrl.monitor import Monitor

class Interrupting(Monitor):
    prompt = True

    def log(self, step, metrics):
        os.kill(os.getpid(), signal.SIGINT)
"""


def learning(folder: Path, *words: str):
    few = ("actor.global_batch_size=8", "actor.micro_batch_size=8", "runner.max_steps=3", "collect.episodes=4")
    model = ("model=flow_small", "model.num_action_chunks=2", "model.num_images_in_input=0", "data.image_aug=false")
    places = (f"data.path={folder}/demos", f"collect.out={folder}/rounds", "runner.experiment_name=learner")
    return configure("dagger", folder, *few, *model, *places, *words)


def test_interrupted_dagger_resumes_with_the_same_command(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "interrupting.py").write_text(INTERRUPTING)
    monkeypatch.syspath_prepend(tmp_path)
    collect(configure("collect", tmp_path, f"collect.out={tmp_path}/demos", "collect.episodes=4"))
    loggers = "runner.logger.backends=[console,interrupting:Interrupting]"
    with pytest.raises(Interrupted, match=r"after step 10; .*; to continue all rounds, run the same command again"):
        dagger(learning(tmp_path, "dagger.rounds=1", "runner.max_steps=11", loggers))
    said = capsys.readouterr().out
    assert f"{tmp_path}/demos: 4 episodes, " in said
    assert f"{tmp_path}/rounds/round_1: 4 episodes, " in said
    assert dagger(learning(tmp_path, "dagger.rounds=1", "runner.max_steps=11")).run.name == "learner_round_1"


@pytest.mark.integration
def test_each_dagger_round_trains_on_all_labels(tmp_path: Path) -> None:
    collect(configure("collect", tmp_path, f"collect.out={tmp_path}/demos", "collect.episodes=4"))
    result = dagger(learning(tmp_path, "dagger.rounds=2"))
    rounds = [read_episodes(folder) for folder in result.data]
    assert [len(rows) for rows in rounds] == [4, 4]
    seeds = [{row["embodyrl/seed"] for row in rows} for rows in rounds]
    assert not seeds[0] & seeds[1]
    learned = load_config_text(result.run)
    assert all(str(folder) in learned for folder in result.data)
    assert str(tmp_path / "runs" / "learner_round_1" / "checkpoints" / "step_000003") in learned
    assert (result.run / "overrides.txt").read_text().startswith("# attempt 1: dagger")
    card = (export(result.run, 3, tmp_path / "out", overrides=["trust=true"]) / "README.md").read_text()
    assert "`embodyrl dagger`" in card
    assert "| trained | supervised |" in card
    assert f"| data | {tmp_path}/demos |" in card
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert dagger(learning(tmp_path, "dagger.rounds=2", "actor.micro_batch_size=4")) == result
    for changed in ("actor.optim.lr=0.5", "data.image_aug=true", "model.num_steps=3", "seed=5"):
        name = changed.partition("=")[0].replace(".", r"\.")
        with pytest.raises(
            ConfigError, match=rf"learner_round_1 was created with {name}=.*experiment_name and collect"
        ):
            dagger(learning(tmp_path, "dagger.rounds=2", changed))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == before


def load_config_text(run: Path) -> str:
    return (run / "config.yaml").read_text(encoding="utf-8")
