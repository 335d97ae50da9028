"""Policies with observation normalization act identically in validation, in `eval`, after resume and after export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from embodyrl.commands.evaluate import evaluate
from embodyrl.commands.train import train
from embodyrl.plan.config import load_config

GYM = ("env=gym", "env.id=Pendulum-v1", "model=mlp", "launcher=inline", "runner.deterministic=true")
SMALL = (
    *("env.train.total_num_envs=2", "env.eval.total_num_envs=2", "env.train.max_steps_per_rollout_epoch=90"),
    *("algorithm=ppo", "algorithm.update_epoch=2", "runner.val_check_interval=2", "runner.save_interval=2"),
    *("eval.episodes=4", "runner.logger.backends=[jsonl]"),
)


def returns(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    return [row["return"] for row in sorted(rows, key=lambda row: row["episode"])]


@pytest.mark.integration
def test_normalized_policy_acts_identically_after_resume_and_export(tmp_path):
    from embodyrl.commands.export import export

    where = f"runner.output_dir={tmp_path}"
    run = train(load_config("train", [*GYM, *SMALL, where, "runner.max_steps=2"])).run
    weights = load_file(run / "checkpoints/step_000002/policy/model.safetensors")
    assert weights["states.count"] == 2 * 2 * 90
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["actor/logprob_gap"] for row in rows[1:]) < 1e-4, "an update sees states as those who acted did"
    validated = returns(run / "eval" / "step_000002")
    words = [*GYM, "eval.episodes=4", "env.eval.total_num_envs=2", where, "runner.logger.backends=[jsonl]"]
    alone = evaluate(load_config("eval", [*words, f"ckpt={run}"]))
    assert returns(alone.folder) == validated
    out = export(run, 2, tmp_path / "exported")
    exported = evaluate(load_config("eval", [*words, f"model.path={out}"]))
    assert returns(exported.folder) == validated
    again = load_config("train", [*GYM, *SMALL, where, "runner.max_steps=2", f"ckpt={run}", "runner.experiment_name=b"])
    assert returns(train(again).run / "eval" / "step_000000") == validated
