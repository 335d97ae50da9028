"""GPU check of ManiSkill: the renderer, PhysX, and one batch of simulators."""

import importlib
import time
from typing import Any

from embodyrl.devices import Gpus
from embodyrl.envs.maniskill.install import (
    DOWNLOAD_PHYSX_SCRIPT,
    GPU_VULKAN_FIX,
    find_vulkan_problem,
    get_physx_path,
)
from embodyrl.envs.maniskill.settings import ManiSkillSettings, ObsMode, SimBackend
from embodyrl.isolation import run_isolated
from embodyrl_gpu_check.result import GpuParts, GpuResult

_FETCH_S = 180.0
_ENVS, _STEPS = 16, 20


def check_batch() -> GpuResult:
    """Start SAPIEN on the GPU, load the GPU library of PhysX, and step a batch."""
    parts = GpuParts()
    if problem := find_vulkan_problem("cuda"):
        parts.failures.append(f"SAPIEN cannot render on the GPU: {problem}")
        return parts.result("", GPU_VULKAN_FIX)
    file = get_physx_path()
    parts.record("PhysX", f"{file} {'exists' if file.is_file() else 'is downloaded'}")
    process = run_isolated(DOWNLOAD_PHYSX_SCRIPT, timeout_s=_FETCH_S)
    if process.code != 0:
        parts.record("log of PhysX", process.log)
        parts.failures.append(f"SAPIEN cannot load PhysX for GPUs: {process.reason}")
        return parts.result("", f"without internet access, copy {file} from another host")
    text = ""
    with parts.part("batch"):
        text = _step(parts)
    return parts.result(f"SAPIEN renders on the GPU; {text}")


def _step(parts: GpuParts) -> str:
    import torch

    simulator: Any = importlib.import_module("embodyrl.envs.maniskill.simulator")
    settings = ManiSkillSettings(
        env_type="maniskill", id="PushCube-v1", obs_mode=ObsMode.state, sim_backend=SimBackend.gpu
    )
    before = Gpus().free
    env = simulator.build(settings, ObsMode.state, _ENVS)
    try:
        env.reset(seed=[*range(_ENVS)])
        action = torch.zeros(_ENVS, env.single_action_space.shape[0], device=env.device)
        env.step(action)
        started = time.perf_counter()
        for _ in range(_STEPS):
            env.step(action)
        torch.cuda.synchronize()
        rate = _ENVS * _STEPS / (time.perf_counter() - started)
        used = (before - Gpus().free) / 2**20
        parts.record(f"steps/s of {_ENVS} environments", round(rate, 1))
        parts.record("MiB of the GPU", round(used, 1))
    finally:
        env.close()
    return f"{rate:.0f} steps/s of {_ENVS} environments, {used:.0f} MiB"
