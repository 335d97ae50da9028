"""Checks of `check-env` that run no simulation: `validate`, imports and `EnvSpec` of the factory."""

import pickle
import sys
from operator import attrgetter

from embodyrl.envs.check.harness import CONTEXT, Harness, check
from embodyrl.isolation import run_isolated
from embodyrl.types import EnvSpec

HEAVY_PACKAGES = (
    "torch",
    "mujoco",
    "robosuite",
    "libero",
    "sapien",
    "mani_skill",
    "gymnasium",
    "OpenGL",
    "transformers",
)
"""Packages that a factory must not import, because their import takes seconds or starts a renderer."""

_PROBE = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from embodyrl.envs import ENVS
cfg = pickle.load(sys.stdin.buffer)
ENVS.get(cfg.env_type).validate(cfg)
print("imported:", *sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[1:])))
"""


@check()
def factory(harness: Harness) -> None:
    """Check that `validate` returns a list of error lines."""
    lines = harness.factory.validate(harness.cfg)
    is_valid = isinstance(lines, list) and all(isinstance(line, str) for line in lines)
    harness.expect(is_valid, "validate", "a list of strings, empty if the config is valid", repr(lines)[:80])


@check()
def light(harness: Harness) -> None:
    """Check that importing the factory and validating a config do not import a package in `HEAVY_PACKAGES`."""
    result = run_isolated(_PROBE, pickle.dumps(sys.path) + pickle.dumps(harness.cfg), arguments=HEAVY_PACKAGES)
    last_line = (result.output.splitlines() or [""])[-1]
    succeeded = result.code == 0 and last_line.startswith("imported:")
    if harness.expect(succeeded, "validate", "to run in a fresh process", result.reason):
        heavy_imports = last_line.removeprefix("imported:").split()
        harness.expect(
            not heavy_imports, "validate", "no heavy import; import in make or later", ", ".join(heavy_imports)
        )


@check()
def spec(harness: Harness) -> None:
    """Check that `EnvSpec` is complete and consistent."""
    spec = harness.spec
    if not harness.expect(isinstance(spec, EnvSpec), "spec", "an EnvSpec", type(spec).__name__):
        return
    second_spec = harness.factory.spec(harness.cfg, CONTEXT)
    harness.expect(spec == second_spec, "spec", "the same spec in every call", "two different specs")
    _check_tasks(harness, spec)
    _check_numbers(harness, spec)
    for warning in spec.warnings:
        harness.warn_unless(False, "spec", "a declaration that matches the behavior", warning)
    if (gripper := spec.action.gripper) is not None:
        is_valid = -spec.action.dim <= gripper.index < spec.action.dim
        harness.expect(is_valid, "spec.action.gripper.index", f"below {spec.action.dim}", gripper.index)
        harness.expect(
            gripper.open != gripper.closed,
            "spec.action.gripper",
            "open and closed to differ",
            f"both are {gripper.open}",
        )
    harness.note = (
        f"{spec.name}: {len(spec.tasks)} tasks, {spec.num_reset_ids} reset ids, {len(spec.cameras.names)} cameras of "
        f"{spec.cameras.size[0]}x{spec.cameras.size[1]}, state {spec.state_dim}, actions {spec.action.dim}, "
        f"success {spec.reward.success}"
    )


def _check_tasks(harness: Harness, spec: EnvSpec) -> None:
    are_named = bool(spec.tasks) and all(isinstance(task, str) and task.strip() for task in spec.tasks)
    harness.expect(are_named, "spec.tasks", "non-empty instructions (strings)", repr(spec.tasks)[:80])
    tasks, states = len(spec.tasks), spec.states_per_task
    harness.expect(len(states) == tasks, "spec.states_per_task", f"{tasks} numbers, one per task", len(states))
    smallest = min(states, default=1)
    harness.expect(smallest >= 1, "spec.states_per_task", "at least 1 for each task", smallest)
    invalid = [task for task in spec.expert.tasks if not 0 <= task < tasks]
    harness.expect(not invalid, "spec.expert.tasks", f"tasks in 0..{tasks - 1}", invalid)


def _check_numbers(harness: Harness, spec: EnvSpec) -> None:
    for name, minimum in {"action.dim": 1, "max_episode_steps": 1, "state_dim": 0}.items():
        value = attrgetter(name)(spec)
        is_valid = isinstance(value, int) and value >= minimum
        harness.expect(is_valid, f"spec.{name}", f"an integer of at least {minimum}", repr(value))
    harness.expect(bool(spec.name.strip()), "spec.name", "a name", repr(spec.name))
    harness.expect(
        len({*spec.cameras.names}) == len(spec.cameras.names),
        "spec.cameras.names",
        "different names",
        [*spec.cameras.names],
    )
    has_size = not spec.cameras.names or min(spec.cameras.size) >= 1
    harness.expect(has_size, "spec.cameras.size", "positive height and width", spec.cameras.size)
    rotation = spec.cameras.rotation_deg
    harness.expect(rotation in (0, 180), "spec.cameras.rotation_deg", "0 or 180", rotation)
