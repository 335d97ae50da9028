"""Checks of ManiSkill's system requirements, and reading of task properties in a separate process."""

import functools
import importlib.util
import json
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from embodyrl.config.settings import to_builtin
from embodyrl.devices import visible_gpus
from embodyrl.envs.maniskill.settings import ManiSkillSettings, SimBackend
from embodyrl.errors import MissingDependencyError
from embodyrl.findings import Finding
from embodyrl.isolation import NoResultError, call_isolated, run_isolated

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

_DOWNLOAD_S = 900.0

_RENDERER_SCRIPT = "import sys, sapien; sapien.render.RenderSystem(sapien.Device(sys.argv[1]))"

_PHYSX_VERSION_SCRIPT = "from sapien import physx; print(physx.version())"

DOWNLOAD_PHYSX_SCRIPT = "from sapien import physx; physx.enable_gpu()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Properties of a ManiSkill task, read after the task was built."""

    control_mode: str
    action_low: tuple[float, ...]
    """Lower action bounds [A]."""
    action_high: tuple[float, ...]
    """Upper action bounds [A]."""
    has_gripper: bool
    """True if the last action dimension is the gripper."""
    state_dim: int
    cameras: tuple[str, ...]
    max_episode_steps: int
    """Time limit of the task itself, in env steps; 0: no limit."""
    samples_scene: bool = False
    """True if objects are sampled when the scene is built, so that a reset id does not determine an episode of a
    batch."""


def find_vulkan_problem(device: str) -> str | None:
    """Start SAPIEN's renderer on a device (cpu or cuda); return the error message, or None on success.

    Rendering on the CPU uses the software driver, even if the driver of a GPU is broken.
    """
    result = run_isolated(_RENDERER_SCRIPT, arguments=(device,))
    return None if result.code == 0 else result.reason


def probe_vulkan() -> Finding:
    """Check that SAPIEN's renderer starts, which ManiSkill needs even for simulation without images."""
    try:
        version = metadata.version("sapien")
    except metadata.PackageNotFoundError:
        return Finding("vulkan", "warn", "sapien is not installed, which ManiSkill needs", INSTALL)
    devices = ("cpu", "cuda") if visible_gpus() else ("cpu",)
    for device in devices:
        if problem := find_vulkan_problem(device):
            text = f"sapien {version}, which ManiSkill needs, cannot start on '{device}': {problem}"
            return Finding("vulkan", "warn", text, VULKAN_FIX if device == "cpu" else GPU_VULKAN_FIX)
    return Finding("vulkan", "ok", f"sapien {version} renders on {' and '.join(devices)}")


def get_physx_path() -> Path:
    """Return the path to which SAPIEN downloads the GPU library of PhysX."""
    result = run_isolated(_PHYSX_VERSION_SCRIPT)
    version = result.output.strip() if result.code == 0 else "VERSION"
    return Path.home() / ".sapien" / "physx" / version / PHYSX


def download_physx() -> None:
    """Download the GPU library of PhysX through SAPIEN, with a timeout and a message.

    Raises:
        MissingDependencyError: PhysX cannot be downloaded or loaded; the message names the file to copy.
    """
    file = get_physx_path()
    if not file.is_file():
        sys.stderr.write(f"SAPIEN downloads PhysX for GPUs into {file.parent}, which may take minutes ...\n")
    result = run_isolated(DOWNLOAD_PHYSX_SCRIPT, timeout_s=_DOWNLOAD_S)
    if result.code != 0:
        raise MissingDependencyError(
            f"env.sim_backend=gpu: SAPIEN cannot load PhysX for GPUs: {result.reason}. Fix: on a host without "
            f"internet access, copy {file} from another host, or use env.sim_backend=cpu."
        )


def describe_in_subprocess(cfg: ManiSkillSettings) -> Description:
    """Return the properties of a task, read in a separate process.

    Building a task takes seconds, may crash in a driver, and may prompt for input.

    Raises:
        EmbodyError: the task cannot be built; the message gives the reason.
    """
    if importlib.util.find_spec("mani_skill") is None or importlib.util.find_spec("sapien") is None:
        raise MissingDependencyError(f"ManiSkill is not installed. Fix: {INSTALL}")
    if cfg.sim_backend is SimBackend.gpu and visible_gpus():
        download_physx()
    # The splits do not change the task.
    names = ManiSkillSettings.model_fields.keys() - {"train", "eval"}
    task = {name: to_builtin(getattr(cfg, name)) for name in sorted(names)}
    return _describe_cached(json.dumps(task))


@functools.lru_cache(maxsize=8)
def _describe_cached(cfg: str) -> Description:
    try:
        settings = ManiSkillSettings.model_validate_json(cfg)
        return call_isolated("embodyrl.envs.maniskill.simulator:describe", settings, kind=Description)
    except NoResultError as error:
        raise MissingDependencyError(
            f"ManiSkill cannot build the task of env.id: {error}. Fix: {INSTALL}; {VULKAN_FIX}"
        ) from error
