"""Actions of a person's inputs."""

from embodyrl.controls import build_arm_controls, get_controls, get_neutral_action, inputs_to_action
from embodyrl.types import ActionKind, ActionSpec, Control, GripperConvention


def test_default_keys_cover_all_dimensions_of_a_box_action() -> None:
    action = ActionSpec(dim=2, low=(-2.0, 0.0), high=(4.0, float("inf")))
    assert [(c.key, c.index, c.value) for c in get_controls(action)] == [
        ("KeyA", 0, -2.0),
        ("KeyD", 0, 4.0),
        ("KeyS", 1, 0.0),
        ("KeyW", 1, 1.0),
    ]
    last = get_neutral_action(action)
    assert inputs_to_action(action, {}, last).tolist() == [0.0, 0.0]
    assert inputs_to_action(action, {1: 0.5, 3: 1.0}, last).tolist() == [2.0, 1.0]
    assert inputs_to_action(action, {0: 1.0, 1: 1.0}, last).tolist() == [2.0, 0.0], "both keys of a pair are added"


def test_gripper_keeps_its_last_command() -> None:
    action = ActionSpec(
        dim=2,
        gripper=GripperConvention(open=-1.0, closed=1.0),
        controls=(Control(label="close", index=-1, value=1.0, key="KeyX"),),
    )
    open_action = get_neutral_action(action)
    assert open_action.tolist() == [0.0, -1.0]
    closed = inputs_to_action(action, {0: 1.0}, open_action)
    assert closed.tolist() == [0.0, 1.0]
    assert inputs_to_action(action, {}, closed).tolist() == [0.0, 1.0]


def test_digit_keys_select_discrete_actions_and_no_key_selects_the_neutral_action() -> None:
    action = ActionSpec(dim=1, kind=ActionKind.discrete, sizes=(3,), neutral=(2.0,))
    last = get_neutral_action(action)
    assert [c.key for c in get_controls(action)] == ["Digit0", "Digit1", "Digit2"]
    assert inputs_to_action(action, {}, last).tolist() == [2.0]
    assert inputs_to_action(action, {1: 1.0}, last).tolist() == [1.0]


def test_gamepad_moves_an_arm_and_turns_it_about_the_vertical() -> None:
    gripper = GripperConvention(open=-1.0, closed=1.0)
    turns = ((3, 0.5), (4, 0.5), (5, 0.5))
    controls = build_arm_controls(right=(1, 1.0), away=(0, -1.0), up=(2, 1.0), turns=turns, gripper=gripper)
    pads = {c.pad: (c.index, c.value) for c in controls if c.pad.startswith("axis")}
    assert pads == {
        **{"axis0+": (1, 1.0), "axis0-": (1, -1.0)},
        **{"axis1-": (0, -1.0), "axis1+": (0, 1.0)},
        **{"axis3-": (2, 1.0), "axis3+": (2, -1.0)},
        **{"axis2+": (5, 0.5), "axis2-": (5, -0.5)},
    }
    assert len({c.key for c in controls}) == len(controls) == 14, "each input has its own key"
