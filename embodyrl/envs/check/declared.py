"""Checks of `check-env` that run no simulation: `validate`, imports and `EnvSpec` of the factory."""

import os
import pickle
import subprocess
import sys
from operator import attrgetter

from embodyrl.envs.check.harness import CONTEXT, Harness, check
from embodyrl.types import EnvSpec

HEAVY = ("torch", "mujoco", "robosuite", "libero", "sapien", "mani_skill", "gymnasium", "OpenGL", "transformers")
"""Packages that a factory must not import, because their import takes seconds or starts a renderer."""

_PROBE = """
import pickle, sys
from embodyrl.envs import ENVS
cfg = pickle.load(sys.stdin.buffer)
ENVS.get(cfg.env_type).validate(cfg)
print("imported:", *sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[1:])))
"""


@check()
def factory(h: Harness) -> None:
    """Check that `validate` returns a list of error lines."""
    lines = h.factory.validate(h.cfg)
    texts = isinstance(lines, list) and all(isinstance(line, str) for line in lines)
    h.expect(texts, "validate", "a list of texts, empty without problems", repr(lines)[:80])


@check()
def light(h: Harness) -> None:
    """Check that importing the factory and validating a config do not import a package in `HEAVY`."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *HEAVY],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        input=pickle.dumps(h.cfg),
        capture_output=True,
        timeout=120,
        check=False,
    )
    last = (done.stdout.decode().splitlines() or [""])[-1]
    ran = done.returncode == 0 and last.startswith("imported:")
    reason = (done.stderr.decode().strip().splitlines() or ["nothing printed"])[-1]
    if h.expect(ran, "validate", "to run in a fresh process", reason):
        heavy = last.removeprefix("imported:").split()
        h.expect(not heavy, "validate", "no heavy import; import in make or later", ", ".join(heavy))


@check()
def spec(h: Harness) -> None:
    """Check that `EnvSpec` is complete and consistent."""
    spec = h.spec
    if not h.expect(isinstance(spec, EnvSpec), "spec", "an EnvSpec", type(spec).__name__):
        return
    again = h.factory.spec(h.cfg, CONTEXT)
    h.expect(spec == again, "spec", "the same spec in every call", "two different specs")
    _tasks(h, spec)
    _numbers(h, spec)
    for warning in spec.warnings:
        h.prefer(False, "spec", "a declaration that matches the behaviour", warning)
    if (grip := spec.action.gripper) is not None:
        inside = -spec.action.dim <= grip.index < spec.action.dim
        h.expect(inside, "spec.action.gripper.index", f"below {spec.action.dim}", grip.index)
        h.expect(grip.open != grip.closed, "spec.action.gripper", "open and closed to differ", f"both are {grip.open}")
    h.note = (
        f"{spec.name}: {len(spec.tasks)} tasks, {spec.num_reset_ids} reset ids, {len(spec.cameras.names)} cameras of "
        f"{spec.cameras.size[0]}x{spec.cameras.size[1]}, state {spec.state_dim}, actions {spec.action.dim}, "
        f"success {spec.reward.success}"
    )


def _tasks(h: Harness, spec: EnvSpec) -> None:
    named = bool(spec.tasks) and all(isinstance(task, str) and task.strip() for task in spec.tasks)
    h.expect(named, "spec.tasks", "non-empty instructions", repr(spec.tasks)[:80])
    tasks, states = len(spec.tasks), spec.states_per_task
    h.expect(len(states) == tasks, "spec.states_per_task", f"{tasks} numbers, one per task", len(states))
    least = min(states, default=1)
    h.expect(least >= 1, "spec.states_per_task", "at least 1 for each task", least)
    wrong = [task for task in spec.expert.tasks if not 0 <= task < tasks]
    h.expect(not wrong, "spec.expert.tasks", f"tasks in 0..{tasks - 1}", wrong)


def _numbers(h: Harness, spec: EnvSpec) -> None:
    for name, least in {"action.dim": 1, "max_episode_steps": 1, "state_dim": 0}.items():
        value = attrgetter(name)(spec)
        fine = isinstance(value, int) and value >= least
        h.expect(fine, f"spec.{name}", f"an integer of at least {least}", repr(value))
    h.expect(bool(spec.name.strip()), "spec.name", "a name", repr(spec.name))
    h.expect(
        len({*spec.cameras.names}) == len(spec.cameras.names),
        "spec.cameras.names",
        "different names",
        [*spec.cameras.names],
    )
    sized = not spec.cameras.names or min(spec.cameras.size) >= 1
    h.expect(sized, "spec.cameras.size", "positive height and width", spec.cameras.size)
    rotation = spec.cameras.rotation_deg
    h.expect(rotation in (0, 180), "spec.cameras.rotation_deg", "0 or 180", rotation)
