"""Banner lines of a run."""

import pytest

from embodyrl.commands.facts import facts
from embodyrl.plan.config import load_config
from embodyrl.plan.run_plan import build_run_plan


@pytest.mark.needs("tabletop")
@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("model=mlp", True),
        ("model=mlp env.eval.task_ids=[3]", False),
        ("model=scripted", False),
        ("model=flow_small", False),
        ("model=act model.path=assets/act env.eval.task_ids=[0,1]", True),
        ("model=act model.path=assets/act env.eval.task_ids=[0]", False),
    ],
)
def test_policy_without_instructions_warns_of_several_tasks(words: str, warned: bool) -> None:
    cfg = load_config("eval", ["env=tabletop", "launcher=inline", *words.split()])
    text = dict(facts(build_run_plan(cfg, training=False))).get("warning", "")
    assert ("reads no instructions" in text) == warned
