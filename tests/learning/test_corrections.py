"""A scripted person corrects a policy through the page in a real browser: minutes, run with `-m slow`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from browser import CHROMIUM, DRIVER
from person import Gamepad, dagger_with_person

from embodyrl.commands.collect import collect
from embodyrl.commands.evaluate import evaluate
from embodyrl.data.layout import Actor
from embodyrl.data.reader import load_demonstrations
from embodyrl.monitor.intervals import wilson
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no Chromium with its driver on this machine"),
]
START = "assets/flow_small_tabletop"
TABLE = ("env=tabletop", "env.train.task_ids=[0,1,2]", "env.train.max_episode_steps=12", "env.train.state_ids=[0,2999]")
QUIET = ("launcher=inline", "runner.logger.backends=[jsonl]")
ROUNDS, CORRECTIONS, STEPS = 2, 20, 150


def measure(ckpt: Path, folder: Path) -> tuple[int, int]:
    """Return successes and episodes on test states."""
    words = (f"ckpt={ckpt}", "env.eval.state_ids=[3500,3999]", "env.eval.task_ids=[0,1,2]", "eval.episodes=300")
    limit = ("env.eval.max_episode_steps=12", "video=none", f"runner.output_dir={folder}")
    cfg = load_config("eval", ["env=tabletop", "model=flow_small", *QUIET, *words, *limit])
    overall = evaluate(cfg).overall
    return round(overall.success_once * overall.episodes), overall.episodes


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_human_corrections_improve_the_policy(tmp_path: Path, seed: int) -> None:
    words = (*TABLE, *QUIET, f"runner.output_dir={tmp_path}/runs", f"seed={seed}")
    demos = f"{tmp_path}/demos"
    front = "env.init_params.camera_names=[front]"
    collect(load_config("collect", [*words, front, f"collect.out={demos}", "collect.episodes=30"]))
    few = (
        f"dagger.rounds={ROUNDS}",
        f"dagger.corrections={CORRECTIONS}",
        "collect.episodes=60",
        f"runner.max_steps={STEPS}",
    )
    places = (f"data.path={demos}", f"collect.out={tmp_path}/rounds", "runner.experiment_name=corrected")
    expert = ("dagger.expert=person:WatchedExpert", "trust=true", "model=flow_small", f"ckpt={START}")
    cfg = load_config("dagger", [*words, *few, *places, *expert])
    check_components(cfg)
    started = time.process_time()
    result, trips = dagger_with_person(cfg, Gamepad(), tmp_path / "profile")
    seconds = time.process_time() - started
    corrected = [load_demonstrations(folder) for folder in result.data]
    episodes = sum(part.num_episodes for part in corrected)
    steps = sum(int((part.actor == Actor.person).sum()) for part in corrected)
    assert episodes <= ROUNDS * CORRECTIONS == 40
    assert all(part.success[part.stop - 1].all() for part in corrected), "the person finishes each episode"
    success, tested = measure(result.run, tmp_path / "evals")
    told = {
        "seed": seed,
        "success": success / tested,
        "interval": wilson(success, tested),
        "corrections": episodes,
        "steps of the person": steps,
        "round trip ms": [round(trips[int(len(trips) * q)], 1) for q in (0.5, 0.95)],
        "cpu s": round(seconds),
    }
    (tmp_path / "result.json").write_text(json.dumps(told))
    assert success / tested > 0.7, "38.0 % before (assets/flow_small_tabletop/CARD.md)"
