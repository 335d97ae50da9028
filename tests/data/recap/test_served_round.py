"""The exported policy of a RECAP round, served to the client of openpi."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import TESTS, start_cli

import embodyrl
from embodyrl.cli.recap import recap
from embodyrl.commands.collect import collect
from embodyrl.commands.evaluate import evaluate
from embodyrl.commands.export import export
from embodyrl.monitor.history import read_episodes
from embodyrl.plan.config import load_config

CLIENTS = os.environ.get("EMBODYRL_TEST_CLIENTS")
"""Python of an environment with openpi-client."""
PLACE = "env.init_params"
VIEW = (
    "env=tabletop",
    f"{PLACE}.camera_heights=56",
    f"{PLACE}.camera_widths=56",
    f"{PLACE}.camera_names=[front]",
)
SMALL = (*VIEW, "env.eval.task_ids=[0,1]", "env.eval.max_episode_steps=24")
EPISODES = 12
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not CLIENTS, reason="EMBODYRL_TEST_CLIENTS names no Python with openpi-client"),
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a short round of RECAP from a trained policy, and export its checkpoint."""
    folder = tmp_path_factory.mktemp("recap")
    quiet = ("launcher=inline", "runner.logger.backends=[jsonl]")
    collect(load_config("collect", [*VIEW, *quiet, f"collect.out={folder}/demos", "collect.episodes=4"]))
    few = ("collect.episodes=4", "runner.max_steps=2", "actor.global_batch_size=8", "actor.micro_batch_size=8")
    value = ("recap.value_steps=3", "recap.value_batch_size=16", "recap.rounds=1", "objective.guidance=1.5")
    shown = ("eval.episodes=2", "runner.val_check_interval=-1", f"recap.out={folder}/out", f"data.path={folder}/demos")
    words = [*SMALL, *quiet, "model=flow_small", "model.path=assets/flow_small_tabletop", *few, *value, *shown]
    assert recap(argparse.Namespace(words=words, config_dir=[], json=False)) == 0
    return export(folder / "out" / "round_1", 2, folder / "exported", overrides=[])


def by_client(client: subprocess.Popen[bytes], env: Any, episode: int) -> tuple[bool, int]:
    """Run an episode with the actions that the client receives; return success and number of steps."""
    assert client.stdin is not None
    assert client.stdout is not None
    seen, _ = env.reset(options={"episode": episode})
    steps = 0
    while True:
        fields = [("observation/image", seen["images"][0].tolist()), ("observation/state", seen["state"].tolist())]
        client.stdin.write(pickle.dumps((fields, seen["instruction"])))
        client.stdin.flush()
        for action in pickle.load(client.stdout):
            seen, _, terminated, truncated, info = env.step(np.asarray(action, np.float32))
            steps += 1
            if terminated or truncated:
                return bool(info["success"]), steps


def test_openpi_client_succeeds_in_the_same_episodes_as_eval(exported: Path, tmp_path: Path) -> None:
    assert json.loads((exported / "advantage.json").read_text())["guidance"] == 1.5
    model = ["model=flow_small", f"model.path={exported}"]
    words = [*SMALL, *model, f"eval.episodes={EPISODES}", f"runner.output_dir={tmp_path}", "launcher=inline"]
    rows = read_episodes(evaluate(load_config("eval", words)).folder / "episodes.jsonl")
    server = start_cli("serve", *SMALL, *model, "serve.port=0", "--json", cwd=tmp_path)
    try:
        server.wait_for(tmp_path / "stdout.txt", lines=1)
        script = [str(CLIENTS), str(TESTS / "real_clients.py"), "infer", json.loads(server.out.read_text())["url"]]
        with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
            env = embodyrl.make_env(SMALL[0].removeprefix("env="), *SMALL[1:])
            try:
                theirs = [by_client(client, env, episode) for episode in range(EPISODES)]
            finally:
                env.close()
                client.kill()
        server.signal_group(signal.SIGINT)
        server.wait(20)
    finally:
        server.stop()
    assert theirs == [(row.success_once, row.steps) for row in rows]
    assert 0 < sum(success for success, _ in theirs) < EPISODES
