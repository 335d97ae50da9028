"""Spaces of inspect-robots for environments of embodyrl."""

import numpy as np
from inspect_robots.spaces import ActionSemantics, Box, CameraSpec, ObservationSpace, StateField, StateSpec

from embodyrl.types import EnvSpec

STATE = "embodyrl_state"
"""Key of the state, whose columns depend on the environment."""
CONTROL_HZ = 20.0
_LABELS = {
    7: ("dx", "dy", "dz", "rx", "ry", "rz", "gripper"),
    4: ("dx", "dy", "dz", "gripper"),
}
"""Names of the action dimensions of Cartesian displacements, by their number."""


def action_space(env: EnvSpec) -> Box:
    """Return the action space of an environment with Cartesian displacements.

    Raises:
        ValueError: the environment has other actions.
    """
    labels = _LABELS.get(env.action.dim)
    if labels is None or env.action.gripper is None:
        raise ValueError(
            f"env '{env.name}' has {env.action.dim} actions{'' if env.action.gripper else ' without a gripper'}; "
            "inspect-robots needs displacements of an end effector: 7 or 4 numbers, the last a gripper."
        )
    rotates = "rx" in labels
    semantics = ActionSemantics(
        control_mode="eef_delta_pose" if rotates else "eef_delta_pos",
        rotation_repr="axis_angle" if rotates else "none",
        gripper="binary" if env.action.gripper.binary else "continuous",
        dim_labels=labels,
    )
    low, high = (np.asarray(bound, np.float64) for bound in env.action.bounds)
    return Box(shape=(env.action.dim,), low=low, high=high, semantics=semantics)


def observation_space(env: EnvSpec, *, images: bool = True, state: bool = True) -> ObservationSpace:
    """Return the cameras and the state of an environment, or the parts that a policy reads."""
    height, width = env.cameras.size
    cameras = tuple(CameraSpec(name, height, width) for name in env.cameras.names) if images else ()
    fields = (StateField(STATE, (env.state_dim,), dtype="float32"),) if state and env.state_dim else ()
    return ObservationSpace(cameras=cameras, state=StateSpec(fields))


def words(overrides: str | list[str]) -> list[str]:
    """Split overrides given as text."""
    return overrides.split() if isinstance(overrides, str) else list(overrides)


def upright(images: np.ndarray, env: EnvSpec) -> np.ndarray:
    """Rotate images [..., H, W, 3] between the simulator's orientation and upright."""
    return np.ascontiguousarray(images[..., ::-1, ::-1, :]) if env.cameras.rotation_deg == 180 else images
