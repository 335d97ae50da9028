"""Conversion of an environment's spec for observation history and temporal ensembling."""

from dataclasses import replace

from embodyrl.types import EnvSpec, ExpertSpec, GoalSpec


def with_history(env: EnvSpec, steps: int) -> EnvSpec:
    """Return the spec with states and cameras of several steps, oldest first; `front_1` is `front` one step earlier."""
    if steps == 1:
        return env
    shown = env.cameras.names
    earlier = tuple(f"{name}_{back}" for back in range(steps - 1, 0, -1) for name in shown)
    offset = (steps - 1) * env.state_dim
    goal = env.goal
    if goal is not None:
        goal = GoalSpec(achieved=_later(goal.achieved, offset), desired=_later(goal.desired, offset))
    cameras = replace(env.cameras, names=(*earlier, *shown))
    return replace(env, cameras=cameras, state_dim=steps * env.state_dim, goal=goal, history=steps * env.history)


def _later(columns: tuple[int, int], offset: int) -> tuple[int, int]:
    return columns[0] + offset, columns[1] + offset


def flattened(env: EnvSpec, chunk: int) -> EnvSpec:
    """Return the spec with a flattened chunk as one action, and without a scripted expert."""
    action, gripper = env.action, env.action.gripper
    # The environment itself snaps the gripper of executed actions.
    gripper = None if gripper is None else replace(gripper, binary=False)
    # A person chooses single actions, not chunks.
    chunked = replace(
        action, dim=chunk * action.dim, low=action.low * chunk, high=action.high * chunk, gripper=gripper, controls=()
    )
    return replace(env, action=chunked, expert=ExpertSpec())
