"""The checks of `check-env` that look at what a factory declares; nothing is simulated."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from embodyrl.config.load import save_config
from embodyrl.config.schema import AlgorithmConfig, Config, EnvConfig
from embodyrl.envs.check_rig import Rig, Violation
from embodyrl.types import EnvSpec

HEAVY = ("torch", "mujoco", "robosuite", "libero", "sapien", "mani_skill", "gymnasium", "OpenGL", "transformers")
"""Packages that take seconds or start a renderer; the driver imports the factory in each run."""

_PROBE = """
import sys
from pathlib import Path
from embodyrl.config.load import load_saved_config
from embodyrl.envs import ENVS
cfg = load_saved_config(Path(sys.argv[1]), [])
ENVS.get(cfg.env.env_type).validate(cfg.env)
print("imported:", *sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[2:])))
"""


def check_factory(rig: Rig) -> Iterator[Violation]:
    """`consumes` names keys, `validate` returns lines."""
    known = {f.name for f in fields(EnvConfig)} - {"env_type", "train", "eval"}
    consumes = rig.factory.consumes
    if not isinstance(consumes, frozenset):
        yield Violation(field="consumes", expected="a frozenset of key names", found=type(consumes).__name__)
    for name in sorted({*consumes} - known):
        yield Violation(field="consumes", expected=f"keys below env ({', '.join(sorted(known))})", found=repr(name))
    lines = rig.factory.validate(rig.cfg)
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        yield Violation(field="validate", expected="a list of texts, empty without problems", found=repr(lines)[:80])


def check_light(rig: Rig) -> Iterator[Violation]:
    """Importing the factory and validating brings in nothing heavy (looked at in a process of its own)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        save_config(Config(env=rig.cfg, algorithm=AlgorithmConfig(group_size=1)), file)
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, str(file), *HEAVY],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    last = (done.stdout.splitlines() or [""])[-1]
    if done.returncode or not last.startswith("imported:"):
        reason = (done.stderr.strip().splitlines() or ["nothing printed"])[-1]
        yield Violation(field="validate", expected="to run in a fresh process", found=reason)
    elif heavy := last.removeprefix("imported:").split():
        yield Violation(field="validate", expected="no heavy import; import in make or later", found=", ".join(heavy))


def check_spec(rig: Rig) -> Iterator[Violation]:
    """`EnvSpec` is complete and makes sense."""
    spec = rig.spec
    if not isinstance(spec, EnvSpec):
        yield Violation(field="spec", expected="an EnvSpec", found=type(spec).__name__)
        return
    if spec != rig.factory.spec(rig.cfg):
        yield Violation(field="spec", expected="the same description in every call", found="two different ones")
    yield from _tasks(spec)
    yield from _numbers(spec)
    if (grip := spec.gripper) is not None:
        if not -spec.action_dim <= grip.index < spec.action_dim:
            yield Violation(field="spec.gripper.index", expected=f"below {spec.action_dim}", found=str(grip.index))
        if grip.open == grip.closed:
            yield Violation(field="spec.gripper", expected="open and closed to differ", found=f"{grip.open} twice")
    rig.note = (
        f"{spec.name}: {len(spec.tasks)} tasks, {spec.num_reset_ids} reset ids, {len(spec.cameras)} cameras of "
        f"{spec.image_size[0]}x{spec.image_size[1]}, state {spec.state_dim}, actions {spec.action_dim}"
    )


def _tasks(spec: EnvSpec) -> Iterator[Violation]:
    if not spec.tasks or not all(isinstance(task, str) and task.strip() for task in spec.tasks):
        yield Violation(field="spec.tasks", expected="instructions, none empty", found=repr(spec.tasks)[:80])
    if len(spec.states_per_task) != len(spec.tasks):
        yield Violation(
            field="spec.states_per_task",
            expected=f"{len(spec.tasks)} numbers, one per task",
            found=str(len(spec.states_per_task)),
        )
    if not all(count >= 1 for count in spec.states_per_task):
        yield Violation(
            field="spec.states_per_task", expected="at least 1 for each task", found=str(min(spec.states_per_task))
        )
    wrong = [task for task in spec.expert_tasks if not 0 <= task < len(spec.tasks)]
    if wrong:
        yield Violation(field="spec.expert_tasks", expected=f"tasks in 0..{len(spec.tasks) - 1}", found=str(wrong))


def _numbers(spec: EnvSpec) -> Iterator[Violation]:
    smallest = {"action_dim": 1, "max_episode_steps": 1, "state_dim": 0}
    for name, least in smallest.items():
        value = getattr(spec, name)
        if not isinstance(value, int) or value < least:
            yield Violation(field=f"spec.{name}", expected=f"an integer of at least {least}", found=repr(value))
    if not spec.name.strip():
        yield Violation(field="spec.name", expected="a name", found=repr(spec.name))
    if len(set(spec.cameras)) != len(spec.cameras):
        yield Violation(field="spec.cameras", expected="different names", found=str(list(spec.cameras)))
    if spec.cameras and min(spec.image_size) < 1:
        yield Violation(field="spec.image_size", expected="positive height and width", found=str(spec.image_size))
    if spec.image_rotation_deg not in (0, 180):
        yield Violation(field="spec.image_rotation_deg", expected="0 or 180", found=str(spec.image_rotation_deg))
