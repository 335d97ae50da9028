"""Episodes whose goal is reached before the first action are counted and listed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from goal_env import NEAR, Started

from embodyrl.commands.eval_result import print_table
from embodyrl.commands.evaluate import evaluate
from embodyrl.envs import ENVS
from embodyrl.envs.protocol import EnvContext, ReportsSolvedStarts
from embodyrl.monitor.history import read_episodes
from embodyrl.plan.config import load_config
from embodyrl.types import EpisodeStart

EPISODES = 12


def is_solved(reset_id: int) -> bool:
    env = Started()
    env.reset(seed=reset_id)
    return bool(np.linalg.norm(env.at - env.goal) <= NEAR)


@pytest.mark.parametrize("env_id", ["goal_env:Started", "goal_env:started_vector"])
def test_evaluation_lists_episodes_solved_at_reset(tmp_path: Path, env_id: str) -> None:
    from embodyrl.reports.card import build_card

    quiet = (
        "launcher=inline",
        "video=none",
        "rollout.pipeline_stage_num=1",
        "runner.logger.backends=[jsonl]",
        f"runner.output_dir={tmp_path}",
    )
    words = ["env=gym", f"env.id={env_id}", "model=random", f"eval.episodes={EPISODES}", "env.eval.total_num_envs=3"]
    result = evaluate(load_config("eval", [*words, "env.eval.max_episode_steps=3", *quiet]))
    rows = read_episodes(result.folder / "episodes.jsonl")
    expected = [row.episode for row in rows if is_solved(row.reset_id)]
    assert 0 < len(expected) < EPISODES, "some and not all"
    assert list(result.solved_at_reset) == expected
    assert [row.episode for row in rows if row.solved_at_reset] == expected
    assert result.metrics()["eval/solved_at_reset"] == len(expected)
    assert json.loads((result.folder / "eval.json").read_text())["solved_at_reset"] == expected
    lines: list[str] = []
    print_table(result, lines.append)
    assert any(f"{len(expected)} of {EPISODES} episodes start with the goal already reached" in line for line in lines)
    assert build_card(result.folder.parents[1])["solved_at_reset"] == len(expected)


def test_tabletop_detects_tasks_solved_at_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    from embodyrl.envs.tabletop.world import create_world

    cfg = load_config("eval", ["env=tabletop", "model=scripted"])
    env = ENVS.get("tabletop").make(cfg.env, EnvContext(num_envs=2))
    assert isinstance(env, ReportsSolvedStarts)
    starts = [EpisodeStart(reset_id=i, seed=0, max_episode_steps=5) for i in (0, 1)]
    env.reset([0, 1], starts)
    assert list(env.solved_at_reset([0, 1])) == []
    monkeypatch.setattr(type(create_world("touch the red block", 0)), "success", lambda world: True)
    env.reset([1], starts[1:])
    assert list(env.solved_at_reset([0, 1])) == [1]
