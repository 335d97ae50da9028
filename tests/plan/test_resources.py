"""Memory-dependent defaults without the planner extension."""

import pytest
from toy_runs import toy_config

from embodyrl.commands.facts import training_facts
from embodyrl.plan.resources import PLANNERS
from embodyrl.plan.run_plan import build_run_plan


@pytest.mark.needs("openvla_oft", "tabletop")
def test_run_without_planner_extension_uses_least_memory_by_default(tmp_path, monkeypatch):
    planned = build_run_plan(toy_config(tmp_path), training=True)
    assert planned.resources.checkpoint > 0
    monkeypatch.setattr(PLANNERS, "group", "none")
    run_plan = build_run_plan(toy_config(tmp_path), training=True)
    assert run_plan.resources.gradient_sync == "micro_batch"
    facts = dict(training_facts(run_plan))
    assert "'planner' is missing" in facts["memory"]
    assert "disk" not in facts
    once = toy_config(tmp_path, "actor.fsdp.gradient_sync=step")
    assert build_run_plan(once, training=True).resources.gradient_sync == "step"
