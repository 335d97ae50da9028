"""Checks of `embodyrl doctor --gpu` that need no simulator and no policy."""

from embodyrl.findings import GpuCheck

_HERE = "embodyrl.cli.doctor"

DEVICES = GpuCheck(
    number=1,
    title="GPUs of CUDA, nvidia-smi and embodyrl",
    function=f"{_HERE}.listing:check_devices",
    timeout_s=90,
    needs=("torch",),
)
SPEED = GpuCheck(
    number=2,
    title="matrix products, copies, and AdamW from a CPU checkpoint",
    function=f"{_HERE}.speed:check_speed",
    timeout_s=180,
    needs=("torch",),
)
DRAWING = GpuCheck(
    number=3,
    title="rendering with EGL",
    function=f"{_HERE}.drawing:check_drawing",
    timeout_s=180,
)
HOST = GpuCheck(
    number=6,
    title="limits of the host",
    function=f"{_HERE}.host:check_host",
    timeout_s=60,
    needs_gpu=False,
)
LINKS = GpuCheck(
    number=7,
    title="NCCL between GPUs",
    function=f"{_HERE}.links:check_links",
    timeout_s=180,
    needs=("torch",),
)
