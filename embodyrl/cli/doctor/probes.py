"""Probes of `doctor`: one function per check of this machine."""

import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from embodyrl.devices import query_gpus, visible_gpus
from embodyrl.envs.mujoco_rendering import choose_renderer, get_egl_device, render_test_frame
from embodyrl.files import available_bytes, available_cores
from embodyrl.findings import Finding

_GIB = 2**30
_INSTALL_COMMANDS = {
    "osmesa": "apt-get install libosmesa6",
    "egl": "apt-get install libegl1 libgl1-mesa-dri; on a headless CPU machine use MUJOCO_GL=osmesa",
}
TORCH_FIX = "TORCH_BUILD=cuda bash scripts/setup.sh, a newer NVIDIA driver, or CUDA_VISIBLE_DEVICES= to use the CPU"
_VLLM_DRIVER = 580
"""Minimum driver version for CUDA 13, for which vLLM's wheels are built."""


def probe_python() -> Finding:
    """Check the Python version."""
    return Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")


def probe_torch() -> Finding:
    """Check the torch version and the devices that torch detects."""
    try:
        import torch

        from embodyrl.policies.tensors import get_cuda_problem
    except (ImportError, OSError) as error:
        reason = str(error).splitlines()[0]
        return Finding("torch", "FAIL", f"cannot be imported: {reason}", "pip install --upgrade torch")
    gpus = visible_gpus()
    if not torch.cuda.is_available():
        if gpus:
            return Finding(
                "torch",
                "FAIL",
                f"{torch.__version__} detects none of {len(gpus)} GPUs: {get_cuda_problem()}",
                TORCH_FIX,
            )
        return Finding("torch", "ok", f"{torch.__version__}, CPU only")
    if len(gpus) != (count := torch.cuda.device_count()):
        text = f"{torch.__version__} detects {count} GPUs, but this host has {len(gpus)} ({', '.join(gpus)})"
        return Finding("torch", "FAIL", text, "CUDA_VISIBLE_DEVICES with the numbers that `nvidia-smi -L` lists")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
    return Finding("torch", "ok", f"{torch.__version__}, {len(names)} CUDA devices ({', '.join(names)}), {bf16}")


def probe_memory() -> Finding:
    """Check the free memory per usable core; a LIBERO worker needs 1 to 2 GiB."""
    free = available_bytes()
    cores = available_cores()
    text = f"{free / _GIB:.1f} GiB free, {cores} cores ({free / cores / _GIB:.1f} GiB per core)"
    if free / cores < 1.5 * _GIB:
        workers = max(1, int(free // (2 * _GIB)))
        return Finding("memory", "warn", text, f"launcher.env_workers={workers}, or close other programs")
    return Finding("memory", "ok", text)


def probe_open_files() -> Finding:
    """Check the limit of open files; each worker opens a few dozen files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        return Finding("ulimit -n", "warn", str(soft), f"ulimit -n {min(4096, hard) if hard > 0 else 4096}")
    return Finding("ulimit -n", "ok", str(soft))


def probe_shared_memory() -> Finding:
    """Check the free space of /dev/shm, which NCCL needs for GPUs without peer access."""
    free, gpus = shutil.disk_usage("/dev/shm").free, len(visible_gpus())
    text = f"{free / _GIB:.1f} GiB free"
    if gpus > 1 and free < _GIB:
        return Finding("/dev/shm", "warn", f"{text} for {gpus} GPUs", "docker run --shm-size=16g, or --ipc=host")
    return Finding("/dev/shm", "ok", text)


def probe_folders(folders: Sequence[Path]) -> list[Finding]:
    """Check that output folders are writable, and report the free disk space."""
    findings = []
    for folder in folders:
        absolute = folder.absolute()
        parent = next(path for path in (absolute, *absolute.parents) if path.exists())
        try:
            with tempfile.TemporaryFile(dir=parent) as file:
                file.write(b"\0")
        except OSError as error:
            fix = "choose other folders with runner.output_dir=DIR and video_cfg.base_dir=DIR"
            findings.append(Finding(f"folder {folder}", "FAIL", f"cannot write to {parent}: {error.strerror}", fix))
            continue
        free = shutil.disk_usage(parent).free
        text = f"writable, {free / _GIB:.1f} GiB free on its disk"
        level, fix = ("warn", "free some space, or lower checkpoint.keep") if free < 2 * _GIB else ("ok", "")
        findings.append(Finding(f"folder {folder}", level, text, fix))
    return findings


def probe_extras() -> list[Finding]:
    """Check the versions of the required packages and of each extra."""
    extras: dict[str, list[Requirement]] = {}
    try:
        required = metadata.requires("embodyrl") or []
    except metadata.PackageNotFoundError:
        fix = "pip install -e . in the source checkout"
        return [Finding("packages", "warn", "embodyrl is not installed, so requirements are unknown", fix)]
    for text in required:
        requirement = Requirement(text)
        match = re.search(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker or ""))
        extras.setdefault(match[1] if match else "", []).append(requirement)
    return [_check_extra(name, requirements) for name, requirements in extras.items()]


def _check_extra(name: str, requirements: Iterable[Requirement]) -> Finding:
    installed, problems = [], []
    for requirement in requirements:
        version = installed_version(requirement.name)
        if version is None:
            problems.append(f"{requirement.name} is missing")
            continue
        installed.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} {version} instead of {requirement.specifier}")
    if not problems:
        return Finding(f"extra {name}" if name else "packages", "ok", ", ".join(installed))
    if not name:
        return Finding("packages", "FAIL", "; ".join(problems), "pip install embodyrl")
    return Finding(f"extra {name}", "warn", "; ".join(problems), f"pip install 'embodyrl[{name}]'")


def probe_driver() -> Finding:
    """Check the version of the GPU driver, including the requirement of vLLM's wheels."""
    driver = max((gpu.driver for gpu in query_gpus()), default=0)
    if not driver:
        if visible_gpus():
            return Finding("driver", "warn", "nvidia-smi does not respond", "install the NVIDIA driver's utilities")
        return Finding("driver", "ok", "no NVIDIA driver")
    if installed_version("vllm") and driver < _VLLM_DRIVER:
        text = f"{driver}, but vLLM's wheels need CUDA 13"
        return Finding("driver", "FAIL", text, f"NVIDIA driver {_VLLM_DRIVER} or newer, or rollout.backend=hf")
    return Finding("driver", "ok", str(driver))


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def probe_rendering() -> Finding:
    """Render one MuJoCo frame with the backend that runs use, and report why this backend is used."""
    version = installed_version("mujoco")
    if version is None:
        return Finding("rendering", "warn", "mujoco is not installed", "pip install 'embodyrl[libero]'")
    renderer, gpus = choose_renderer(), visible_gpus()
    name = f"mujoco {version} with MUJOCO_GL={renderer.backend} ({renderer.reason})"
    frame = render_test_frame(renderer.backend, get_egl_device(gpus[0]) if renderer.backend == "egl" and gpus else "")
    if frame.problem:
        fix = _INSTALL_COMMANDS.get(renderer.backend, "MUJOCO_GL=osmesa (CPU) or MUJOCO_GL=egl (GPU)")
        return Finding("rendering", "FAIL", f"{name} cannot render: {frame.problem}", fix)
    return Finding("rendering", "warn" if renderer.fix else "ok", f"{name} renders on {frame.driver}", renderer.fix)


def probe_video() -> Finding:
    """Check that the ffmpeg encoder of imageio starts."""
    fix = "pip install 'imageio[ffmpeg]'"
    try:
        from imageio_ffmpeg import get_ffmpeg_exe, get_ffmpeg_version

        version, program = get_ffmpeg_version(), get_ffmpeg_exe()
    except (ImportError, RuntimeError, OSError) as error:
        return Finding("video", "FAIL", f"no ffmpeg: {error}", fix)
    return Finding("video", "ok", f"ffmpeg {version} ({program})")
