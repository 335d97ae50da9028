"""Table of the GPU checks, without their imports."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCheck:
    """A check, which runs in a separate process with a deadline."""

    title: str
    function: str
    """`package.module:function` without arguments, which returns a `GpuResult`."""
    timeout_s: float
    needs_gpu: bool = True
    needs: tuple[str, ...] = ()
    """Required modules; the check is skipped if a module is missing."""


CHECKS = {
    "devices": GpuCheck(
        title="GPUs of CUDA, nvidia-smi and embodyrl",
        function="embodyrl_gpu_check.listing:check_devices",
        timeout_s=90,
        needs=("torch",),
    ),
    "speed": GpuCheck(
        title="matrix products, copies, and AdamW from a CPU checkpoint",
        function="embodyrl_gpu_check.speed:check_speed",
        timeout_s=180,
        needs=("torch",),
    ),
    "drawing": GpuCheck(
        title="rendering with EGL",
        function="embodyrl_gpu_check.drawing:check_drawing",
        timeout_s=180,
    ),
    "libero": GpuCheck(
        title="one chunk of LIBERO",
        function="embodyrl_gpu_check.libero:check_chunk",
        timeout_s=240,
        needs_gpu=False,
        needs=("libero", "mujoco", "robosuite"),
    ),
    "sapien": GpuCheck(
        title="SAPIEN: renderer, PhysX, a batch of 16",
        function="embodyrl_gpu_check.sapien:check_batch",
        timeout_s=480,
        needs=("sapien", "mani_skill"),
    ),
    "host": GpuCheck(
        title="limits of the host",
        function="embodyrl_gpu_check.host:check_host",
        timeout_s=60,
        needs_gpu=False,
    ),
    "links": GpuCheck(
        title="NCCL between GPUs", function="embodyrl_gpu_check.links:check_links", timeout_s=180, needs=("torch",)
    ),
    "vllm": GpuCheck(
        title="vLLM: versions, sleep and new weights",
        function="embodyrl_gpu_check.vllm_engine:check_vllm",
        timeout_s=420,
        needs=("torch", "vllm", "transformers"),
    ),
    "openvla_oft": GpuCheck(
        title="OpenVLA-OFT at 7B with two layers: acting, CUDA graphs, training",
        function="embodyrl_gpu_check.openvla_oft:check_policy",
        timeout_s=300,
        needs=("torch",),
    ),
    "presets": GpuCheck(
        title="presets that fit, and the predicted time of a step",
        function="embodyrl_gpu_check.presets:check_presets",
        timeout_s=300,
        needs=("libero", "mujoco", "robosuite"),
    ),
}
"""Checks by name, in the order of the report."""
