"""Specs of environments with a history of observations or with chunks as actions."""

from dataclasses import replace

from embodyrl.types import ActionSpace, EnvSpec


def with_history(env: EnvSpec, steps: int) -> EnvSpec:
    """Return the spec with states and cameras of several steps, oldest first; `front_1` is `front` one step before."""
    if steps == 1:
        return env
    cameras = (*(f"{name}_{back}" for back in range(steps - 1, 0, -1) for name in env.cameras), *env.cameras)
    offset = (steps - 1) * env.state_dim
    goals = {
        name: (columns[0] + offset, columns[1] + offset)
        for name in ("achieved_goal", "desired_goal")
        if any(columns := getattr(env, name))
    }
    return replace(env, cameras=cameras, state_dim=steps * env.state_dim, **goals)


def flattened(env: EnvSpec, chunk: int) -> EnvSpec:
    """Return the spec with chunks of actions as one action; no expert gives these."""
    space = env.action_space
    if space is not None:
        space = ActionSpace(kind=space.kind, low=space.low * chunk, high=space.high * chunk)
    # The environment itself snaps the gripper of what is executed.
    gripper = None if env.gripper is None else replace(env.gripper, binary=False)
    return replace(env, action_dim=chunk * env.action_dim, action_space=space, gripper=gripper, expert_tasks=())
