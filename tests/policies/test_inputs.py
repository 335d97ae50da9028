"""The inputs that a policy was trained on are saved with its weights and compared with the environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embodyrl.errors import CheckpointError
from embodyrl.policies.inputs import (
    INPUTS_FILE,
    find_input_problems,
    find_short_limits,
    find_unknown_instructions,
    write_inputs,
)
from embodyrl.types import (
    ActionKind,
    ActionSpec,
    CameraSpec,
    EnvSpec,
    GripperConvention,
    InputSpec,
    PolicySpec,
)

ENDS = GripperConvention(open=-1.0, closed=1.0)
ENV = EnvSpec(
    name="shop",
    action=ActionSpec(dim=7, gripper=ENDS),
    tasks=("a",),
    states_per_task=(1,),
    cameras=CameraSpec(names=("front", "wrist", "top")),
)
POLICY = PolicySpec(
    name="p",
    num_action_chunks=1,
    action_dim=7,
    tokens_per_chunk=7,
    inputs=InputSpec(num_images=2, rotates_images=False),
    gripper=ENDS,
)


def compare(tmp_path: Path, policy: dict[str, Any], env: dict[str, Any], renamed: list[str] | None = None) -> list[str]:
    write_inputs(tmp_path, POLICY, ENV)
    shown = replace(POLICY, inputs=replace(POLICY.inputs, **policy.pop("inputs", {})), **policy)
    cameras, action = (
        replace(part, **env.pop(name, {})) for name, part in (("cameras", ENV.cameras), ("action", ENV.action))
    )
    found = find_input_problems(tmp_path, shown, replace(ENV, cameras=cameras, action=action, **env), renamed)
    return [" ".join(problem) for problem in found]


@pytest.mark.parametrize(
    ("policy", "env", "renamed", "said"),
    [
        ({}, {}, None, None),
        ({}, {"cameras": {"names": ("front", "wrist")}}, None, None),
        ({}, {"name": "other"}, None, None),
        (
            {},
            {"cameras": {"names": ("wrist", "front")}},
            None,
            r"trained on the cameras \[front,wrist\].*has \[wrist,front\]",
        ),
        ({}, {"cameras": {"names": ("wrist", "front")}}, ["wrist", "front"], None),
        (
            {},
            {"cameras": {"names": ("wrist", "front")}},
            ["front", "wrist"],
            r"has \[wrist,front\]. Select those cameras",
        ),
        ({"inputs": {"num_images": 1}}, {}, None, r"has \[front\]"),
        ({}, {"cameras": {"rotation_deg": 180}}, None, "image_rotation_deg=0, but env 'shop' has frames with 180"),
        ({"inputs": {"rotates_images": True}}, {"cameras": {"rotation_deg": 180}}, None, None),
        ({"gripper": None}, {"action": {"gripper": None}}, None, "needs no gripper convention"),
        ({"gripper": GripperConvention(open=1.0, closed=0.0)}, {}, None, "a gripper that opens at 1 and closes at 0"),
        ({"gripper": replace(ENDS, index=6, binary=True)}, {}, None, None),
        ({"gripper": replace(ENDS, index=0)}, {}, None, r"needs a gripper \(action 0\) that opens at -1"),
    ],
)
def test_different_policy_inputs_are_reported(
    tmp_path: Path, policy: Any, env: Any, renamed: Any, said: str | None
) -> None:
    problems = compare(tmp_path, policy, env, renamed)
    assert len(problems) == (said is not None), problems
    if said is not None:
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(problems[0])


def test_missing_inputs_file_compares_configured_cameras_only(tmp_path: Path) -> None:
    assert [*find_input_problems(tmp_path, POLICY, ENV, None)] == []
    assert [*find_input_problems(tmp_path, POLICY, ENV, ["front", "wrist"])] == []
    assert len([*find_input_problems(tmp_path, POLICY, ENV, ["top", "wrist"])]) == 1
    write_inputs(tmp_path, POLICY, replace(ENV, action=replace(ENV.action, kind=ActionKind.text)))
    assert not (tmp_path / INPUTS_FILE).exists()


def test_error_names_the_damaged_inputs_file(tmp_path: Path) -> None:
    (tmp_path / INPUTS_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match=r"embodyrl_inputs.json is missing or malformed"):
        list(find_input_problems(tmp_path, POLICY, ENV, None))


@pytest.mark.parametrize(
    ("tasks", "chosen", "instructed", "warned"),
    [
        (("sweep", "open the door"), [0, 1], True, False),
        (("sweep", "close the door"), [0, 1], True, False),
        (("sweep", "close the door"), [1], True, True),
        (("PICK", "PLACE"), [0, 1], True, True),
        (("PICK", "PLACE"), [0, 1], False, False),
    ],
)
def test_instructions_missing_from_training_give_a_warning(tmp_path: Path, tasks, chosen, instructed, warned) -> None:
    reads = replace(POLICY, inputs=replace(POLICY.inputs, instructions=True))
    write_inputs(tmp_path, reads, replace(ENV, tasks=("sweep", "open the door"), states_per_task=(1, 1)))
    env = replace(ENV, tasks=tasks, states_per_task=(1, 1), text=replace(ENV.text, instructed=instructed))
    found = find_unknown_instructions(tmp_path, env, chosen)
    assert (found is not None) == warned
    if warned:
        assert f"for example {tasks[chosen[0]]!r}; instructions in training: 2, for example 'sweep'" in str(found)


def test_time_limits_below_the_longest_demonstration_give_a_warning(tmp_path: Path) -> None:
    write_inputs(tmp_path, POLICY, replace(ENV, longest_demonstration=380))
    limits = {"env.train.max_episode_steps": 380, "env.eval.max_episode_steps": 320}
    found = str(find_short_limits(tmp_path, limits))
    assert "has 380 steps, more than env.eval.max_episode_steps=320, so" in found
    assert find_short_limits(tmp_path, {"env.train.max_episode_steps": 380}) is None
    write_inputs(tmp_path, POLICY, ENV)
    assert find_short_limits(tmp_path, limits) is None


def test_policies_without_instructions_give_no_warning(tmp_path: Path) -> None:
    write_inputs(tmp_path, POLICY, ENV)
    assert find_unknown_instructions(tmp_path, replace(ENV, tasks=("other",)), [0]) is None
    assert find_unknown_instructions(tmp_path / "elsewhere", ENV, [0]) is None
