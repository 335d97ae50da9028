"""The inspect-robots plug-in conforms to its checks, and runs the episodes of `embodyrl eval`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("inspect_robots", reason="inspect-robots is not installed")

ROOT = Path(__file__).parents[2]
PATH = ROOT / "assets" / "openvla_oft_tabletop"
OVERRIDES = "model=openvla_oft_tiny env.eval.task_ids=[0,1,2]"

pytestmark = [pytest.mark.integration]


@pytest.fixture
def plugin(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "integrations" / "inspect_robots_embodyrl")
    import inspect_robots_embodyrl

    yield inspect_robots_embodyrl
    for name in [name for name in sys.modules if name.startswith("inspect_robots_embodyrl")]:
        del sys.modules[name]


def test_embodiment_passes_the_conformance_check(plugin):
    from inspect_robots.conformance import assert_guardrail_contribution_conformant, check_embodiment

    embodiment = plugin.EmbodyrlEmbodiment("tabletop", OVERRIDES)
    try:
        report = check_embodiment(embodiment.info)
        assert report.ok
        assert report.issues == ()
        assert_guardrail_contribution_conformant(embodiment, embodiment.info.action_space)
    finally:
        embodiment.close()


def test_environment_without_end_effector_actions_is_rejected(plugin):
    with pytest.raises(ValueError, match="end effector"):
        plugin.EmbodyrlEmbodiment("gym", "env.id=CartPole-v1")


@pytest.mark.timeout(300)
def test_inspect_robots_and_eval_succeed_in_the_same_episodes(plugin, tmp_path):
    from inspect_robots.eval import eval as evaluate

    from embodyrl.cli.main import main

    words = ["eval", f"ckpt={PATH}", *OVERRIDES.split(), "eval.episodes=6", f"runner.output_dir={tmp_path}"]
    assert main(words) == 0
    (file,) = tmp_path.glob("*/eval/*/episodes.jsonl")
    ours = {row["episode"]: row["success_once"] for row in map(json.loads, file.read_text().splitlines())}
    embodiment = plugin.EmbodyrlEmbodiment("tabletop", OVERRIDES)
    task = plugin.episodes("tabletop", OVERRIDES, count=6)
    try:
        (log,) = evaluate(
            task, plugin.EmbodyrlPolicy(str(PATH), "env=tabletop"), embodiment, log_dir=str(tmp_path / "logs")
        )
    finally:
        embodiment.close()
    assert log.status == "success"
    theirs = {s.scene_metadata["episode"]: bool(s.reduced["success_at_end"]) for s in log.samples}
    assert theirs == ours
    assert 0 < sum(ours.values()) < 6
