"""Check of Vulkan for `embodyrl doctor`."""

from importlib import metadata

from embodyrl.devices import visible_gpus
from embodyrl.envs.maniskill.install import GPU_VULKAN_FIX, INSTALL, VULKAN_FIX, find_vulkan_problem
from embodyrl.findings import Finding


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
