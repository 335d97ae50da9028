"""Keyboard and gamepad inputs that control an environment in `embodyrl play`, and their conversion to actions."""

from collections.abc import Mapping, Sequence

import numpy as np

from embodyrl.types import ActionKind, ActionSpec, Control, FloatArray, GripperConvention

Direction = tuple[int, float]
"""Action dimension, and the value of this dimension while the key is pressed."""

_PAIRS = (("KeyA", "KeyD", "axis0"), ("KeyS", "KeyW", "axis1"), ("KeyQ", "KeyE", "axis3"), ("KeyJ", "KeyL", "axis2"))
_PAIRS += (("KeyK", "KeyI", ""), ("KeyU", "KeyO", ""), ("KeyZ", "KeyX", ""), ("KeyC", "KeyV", ""))
"""Decreasing key, increasing key and gamepad axis of each action dimension; empty: no gamepad axis."""
_INVERTED_AXES = ("axis1", "axis3")
"""Gamepad axes whose value is negative when the stick is pushed up."""


def build_arm_controls(
    *, right: Direction, away: Direction, up: Direction, gripper: GripperConvention, turns: Sequence[Direction] = ()
) -> tuple[Control, ...]:
    """Return the keyboard and gamepad inputs of an arm with Cartesian actions. Directions refer to the camera image.

    Args:
        right: action dimension and value for a motion to the right of the image.
        away: the same for a motion away from the viewer.
        up: the same for an upward motion.
        gripper: values that open and close the gripper, and its action dimension.
        turns: action dimension and value of the rotations about x, y and z.
    """
    motions = [("left", "right", right), ("back", "away", away), ("down", "up", up)]
    motions += [(f"turn {axis}-", f"turn {axis}+", turn) for axis, turn in zip("xyz", turns, strict=False)]
    axes = ("axis0", "axis1", "axis3", "", "", "axis2")  # axis2 rotates a gripper that points down about z
    controls = []
    for (low_label, high_label, (index, value)), (low_key, high_key, _), pad in zip(
        motions, _PAIRS, axes, strict=False
    ):
        controls += _build_pair((low_label, high_label), index, (-value, value), (low_key, high_key), pad)
    gripper_inputs = [("close", gripper.closed, "KeyX", "button0"), ("open", gripper.open, "KeyZ", "button1")]
    return (*controls, *(Control(label=n, index=gripper.index, value=v, key=k, pad=p) for n, v, k, p in gripper_inputs))


def get_controls(action: ActionSpec) -> tuple[Control, ...]:
    """Return the inputs that the environment declares, or default keys.

    The default is two keys per action dimension, or a digit key per discrete action.
    """
    if action.controls is not None:
        return action.controls
    if action.kind is ActionKind.discrete:
        return tuple(
            Control(label=str(i), index=0, value=float(i), key=f"Digit{i}") for i in range(min(10, action.sizes[0]))
        )
    if action.kind is not ActionKind.box:
        return ()
    controls = []
    for index, (low, high, (low_key, high_key, pad)) in enumerate(zip(*action.bounds, _PAIRS, strict=False)):
        limits = max(low, -1.0) if np.isinf(low) else low, min(high, 1.0) if np.isinf(high) else high
        controls += _build_pair((f"{index} -", f"{index} +"), index, limits, (low_key, high_key), pad)
    return tuple(controls)


def get_neutral_action(action: ActionSpec) -> FloatArray:
    """Return the action [A] that is executed while no key or button is pressed: no motion, open gripper."""
    neutral = np.array(action.neutral or np.clip(np.zeros(action.dim), *action.bounds), np.float32)
    if action.gripper is not None:
        neutral[action.gripper.index] = action.gripper.open
    return neutral


def inputs_to_action(action: ActionSpec, amounts: Mapping[int, float], last: FloatArray) -> FloatArray:
    """Return the action [A] for pressed inputs.

    Args:
        action: the action space.
        amounts: how far each input is pressed, from 0 to 1, by the index of the input in `get_controls`.
        last: the last executed action [A], whose gripper command is kept.
    """
    controls, result = get_controls(action), get_neutral_action(action)
    if action.kind is not ActionKind.box:
        for number, amount in amounts.items():
            if amount > 0.5:
                result[controls[number].index] = controls[number].value
        return result
    gripper_index = None if action.gripper is None else action.gripper.index % action.dim
    if gripper_index is not None:
        result[gripper_index] = last[gripper_index]
    rest = result.copy()
    for number, amount in amounts.items():
        control = controls[number]
        index = control.index % action.dim
        if index != gripper_index:
            result[index] += amount * (control.value - rest[index])
        elif amount > 0.5:
            result[index] = control.value
    return np.clip(result, *action.bounds).astype(np.float32)


def _build_pair(
    labels: tuple[str, str], index: int, values: tuple[float, float], keys: tuple[str, str], pad: str
) -> list[Control]:
    signs = ("+", "-") if pad in _INVERTED_AXES else ("-", "+")
    pads = [f"{pad}{sign}" if pad else "" for sign in signs]
    rows = zip(labels, values, keys, pads, strict=True)
    return [Control(label=label, index=index, value=value, key=key, pad=pad) for label, value, key, pad in rows]
