"""What ManiSkill needs of the machine, and a task's description, both found out in a process of its own."""

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl import errors
from embodyrl.config.settings import plain
from embodyrl.devices import visible_gpus
from embodyrl.envs.maniskill.settings import ManiSkillSettings, SimBackend
from embodyrl.errors import MissingDependencyError

INSTALL = "pip install 'embodyrl[maniskill]'"

VULKAN_FIX = (
    "apt-get install libvulkan1 mesa-vulkan-drivers, in version 25 or newer (on Debian 12 from bookworm-backports; "
    "scripts/setup.sh does it)"
)

GPU_VULKAN_FIX = (
    "apt-get install libxext6 libglx0 libegl1, which NVIDIA's Vulkan driver loads; in a container start it with "
    "NVIDIA_DRIVER_CAPABILITIES=all"
)
PHYSX = "libPhysXGpu_64.so"

_TIMEOUT_S = 180.0
_FETCH_S = 900.0

_START_RENDERER = "import sys, sapien; sapien.render.RenderSystem(sapien.Device(sys.argv[1]))"

_FIND_PHYSX = "from sapien import physx; print(physx.version())"

_FETCH_PHYSX = "from sapien import physx; physx.enable_gpu()"

_DESCRIBE = """
import dataclasses, json, os, sys
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from embodyrl.envs.maniskill.settings import ManiSkillSettings
from embodyrl.envs.maniskill.simulator import describe
from embodyrl.errors import EmbodyError
given = ManiSkillSettings.model_validate_json(sys.stdin.read())
try:
    json.dump({"found": dataclasses.asdict(describe(given))}, answer)
except EmbodyError as error:
    json.dump({"error": type(error).__name__, "text": str(error)}, answer)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a built task says about itself."""

    control_mode: str
    action_low: tuple[float, ...]
    """[A]"""
    action_high: tuple[float, ...]
    """[A]"""
    has_gripper: bool
    """The last action dimension commands a gripper."""
    state_dim: int
    cameras: tuple[str, ...]
    max_episode_steps: int
    """The task's own time limit, env steps; 0: none."""
    draws_scene: bool = False
    """A reset id would not decide which objects a scene holds that is built once, as in a batch."""


def vulkan_problem(device: str) -> str | None:
    """Start SAPIEN's renderer on a device, cpu or cuda; None: it works.

    The software driver answers for the CPU also where a GPU's own is broken.
    """
    done = _run_apart(_START_RENDERER, words=(device,))
    if done is None:
        return f"no answer within {_TIMEOUT_S:.0f} s"
    return None if done.returncode == 0 else _last_words(done)


def fetch_physx() -> None:
    """Let SAPIEN download PhysX for GPUs, as its first scene would: with a deadline of its own and a word about it.

    Raises:
        MissingDependencyError: it could not be fetched or loaded; the message names the file to copy.
    """
    found = _run_apart(_FIND_PHYSX)
    version = found.stdout.strip() if found is not None and found.returncode == 0 else "VERSION"
    file = Path.home() / ".sapien" / "physx" / version / PHYSX
    if not file.is_file():
        sys.stderr.write(f"SAPIEN downloads PhysX for GPUs into {file.parent}, which may take minutes ...\n")
    done = _run_apart(_FETCH_PHYSX, timeout_s=_FETCH_S)
    if done is None or done.returncode:
        reason = f"no end within {_FETCH_S:.0f} s" if done is None else _last_words(done)
        raise MissingDependencyError(
            f"env.sim_backend=gpu: SAPIEN cannot load PhysX for GPUs: {reason}. Fix: without a network copy {file} "
            "from a host that has it, or use env.sim_backend=cpu."
        )


def describe_apart(cfg: ManiSkillSettings) -> Description:
    """Describe a task: importing and building it takes seconds, may crash in a driver, and must not ask questions.

    Raises:
        EmbodyError: the task cannot be built; the message says why.
    """
    if importlib.util.find_spec("mani_skill") is None or importlib.util.find_spec("sapien") is None:
        raise MissingDependencyError(f"ManiSkill is not installed. Fix: {INSTALL}")
    if cfg.sim_backend is SimBackend.gpu and visible_gpus():
        fetch_physx()
    task = {name: plain(getattr(cfg, name)) for name in ManiSkillSettings.model_fields}  # without the splits
    return _described(json.dumps(task))


@functools.lru_cache(maxsize=8)
def _described(cfg: str) -> Description:
    done = _run_apart(_DESCRIBE, cfg)
    if done is None:
        raise MissingDependencyError(
            f"ManiSkill did not build its task within {_TIMEOUT_S:.0f} s, likely because of its Vulkan driver. "
            f"Fix: {VULKAN_FIX}"
        )
    if done.returncode:
        raise MissingDependencyError(
            f"ManiSkill failed to build its task: {_last_words(done)}. Fix: {INSTALL}; {VULKAN_FIX}"
        )
    answer = json.loads(done.stdout)
    # Errors travel by class name and text: both processes have the same classes.
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["text"])
    found: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in answer["found"].items()}
    return Description(**found)


def _run_apart(
    code: str, given: str = "", *, words: Sequence[str] = (), timeout_s: float = _TIMEOUT_S
) -> subprocess.CompletedProcess[str] | None:
    """Run Python code in a process of its own; None: it did not end in time."""
    command = [sys.executable, "-c", code, *words]
    try:
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return None


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    return f"it died of signal {-done.returncode}" if done.returncode < 0 or not lines else lines[-1]
