"""The LeRobot plug-ins score our environments and run our policies, with the episodes of `embodyrl eval`."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "integrations"
LEROBOT = os.environ.get("EMBODYRL_TEST_LEROBOT")
"""Python of an environment with LeRobot and both plug-ins."""
real_lerobot = pytest.mark.skipif(
    not LEROBOT, reason="EMBODYRL_TEST_LEROBOT names no Python with LeRobot and the plug-ins of integrations/"
)
SMALL = (
    "env.init_params.camera_heights=56",
    "env.init_params.camera_widths=56",
    "env.init_params.camera_names=[front]",
)
TOUCH = (*SMALL, "env.eval.task_ids=[0,1]", "env.eval.max_episode_steps=24")


def client():
    """Return the module of the plug-ins that starts processes, which needs no LeRobot."""
    return runpy.run_path(str(FOLDER / "lerobot_env_embodyrl" / "lerobot_env_embodyrl" / "process.py"))


def start(distribution: str, **arguments: object):
    script = FOLDER / distribution / distribution / "worker.py"
    return client()["Worker"](script, arguments, python=sys.executable, timeout_s=120.0)


@pytest.mark.integration
def test_simulator_runs_in_another_process():
    worker = start("lerobot_env_embodyrl", request="make", task="tabletop", overrides=list(TOUCH))
    try:
        layout = worker.description
        assert (layout["cameras"], layout["size"], layout["max_episode_steps"]) == (("front",), (56, 56), 24)
        first = worker.ask(request="reset", episode=0)
        assert (first["task"], first["images"].shape, first["state"].shape) == (0, (1, 56, 56, 3), (4,))
        assert worker.ask(request="reset", episode=1)["task"] == 1
        again = worker.ask(request="reset", episode=0)
        assert np.array_equal(again["images"], first["images"])
        assert worker.ask(request="step", action=np.zeros(7, np.float32))["truncated"] is False
        assert worker.ask(request="render")["frame"].ndim == 3
        with pytest.raises(RuntimeError, match="episode"):
            worker.ask(request="reset", episode=-1)
    finally:
        worker.close()


@pytest.mark.integration
def test_invalid_plugin_settings_are_reported():
    with pytest.raises(RuntimeError, match="tabeltop"):
        start("lerobot_env_embodyrl", request="make", task="tabeltop", overrides=[])


@pytest.mark.integration
def test_policy_runs_in_another_process():
    path = str(ROOT / "assets" / "openvla_oft_tabletop")
    worker = start("lerobot_policy_embodyrl", request="load", run=path, overrides=["env=tabletop"])
    try:
        assert worker.description == {"cameras": ("front",), "state_dim": 4}
        seen = {"images": np.zeros((2, 1, 56, 56, 3), np.uint8), "state": np.zeros((2, 4), np.float32)}
        reply = worker.ask(request="act", instructions=["touch the red block"] * 2, **seen)
        assert reply["actions"].shape == (2, 4, 7)
    finally:
        worker.close()


def lerobot_eval(out: Path, *words: str) -> list[bool]:
    """Run `lerobot-eval` on ten episodes of the tabletop and return their successes."""
    assert LEROBOT
    command = [str(Path(LEROBOT).parent / "lerobot-eval"), "--policy.device=cpu", "--env.type=embodyrl"]
    command += [f"--env.overrides={json.dumps(TOUCH)}", "--eval.n_episodes=10", "--eval.batch_size=5"]
    variables = os.environ | {"EMBODYRL_PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"}
    subprocess.run([*command, f"--output_dir={out}", *words], check=True, env=variables, timeout=300)
    (task,) = json.loads((out / "eval_info.json").read_text())["per_task"]
    return task["metrics"]["successes"]


def embodyrl_eval(out: Path, *words: str) -> list[bool]:
    """Run `embodyrl eval` on the same episodes."""
    from embodyrl.cli.main import main

    assert main(["eval", "env=tabletop", *TOUCH, "eval.episodes=10", f"runner.output_dir={out}", *words]) == 0
    (file,) = out.glob("*/eval/*/episodes.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["success_once"] for row in sorted(rows, key=lambda row: row["episode"])]


@real_lerobot
@pytest.mark.integration
@pytest.mark.timeout(900)
def test_embodyrl_policy_succeeds_in_the_same_episodes_in_lerobot(tmp_path):
    path = ROOT / "assets" / "openvla_oft_tabletop"
    words = ("--policy.type=embodyrl", f"--policy.run={path}", '--policy.overrides=["env=tabletop"]')
    ours = embodyrl_eval(tmp_path / "ours", f"ckpt={path}")
    assert lerobot_eval(tmp_path / "theirs", *words) == ours
    assert 0 < sum(ours) < 10
