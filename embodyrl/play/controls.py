"""Conversion of pressed keys and gamepad inputs to actions."""

from collections.abc import Mapping

import numpy as np

from embodyrl.controls import get_controls
from embodyrl.types import ActionKind, ActionSpec, FloatArray


def neutral_action(action: ActionSpec) -> FloatArray:
    """Return the action [A] while no key or button is pressed: no motion, open gripper."""
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
    controls, result = get_controls(action), neutral_action(action)
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
