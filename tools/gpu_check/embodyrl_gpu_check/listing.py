"""Check that CUDA, `nvidia-smi` and embodyrl list the same GPUs."""

import shutil
import subprocess

import torch

from embodyrl.cli.doctor.probes import TORCH_FIX
from embodyrl.devices import Gpu, query_gpus, select_visible, visible_gpus
from embodyrl.policies.tensors import get_cuda_problem
from embodyrl_gpu_check.result import GpuParts, GpuResult

_GIB = 2**30
_DETAIL_FIELDS = (
    "driver_version,pci.bus_id,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,power.limit,ecc.mode.current"
)


def check_devices() -> GpuResult:
    """Compare the GPUs of CUDA, `nvidia-smi` and embodyrl, by UUID if possible, and read their free memory."""
    parts, visible, listed = GpuParts(), visible_gpus(), query_gpus()
    parts.record("visible", list(visible))
    parts.record("nvidia-smi", [f"{gpu.number} {gpu.uuid} {gpu.name}" for gpu in listed])
    parts.record("torch", f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    parts.record("architectures", torch.cuda.get_arch_list())
    with parts.part("details of nvidia-smi"):
        parts.record("details", details())
    if not torch.cuda.is_available():
        parts.failures.append(f"torch {torch.__version__} cannot use {len(visible)} GPUs: {get_cuda_problem()}")
        return parts.result("", TORCH_FIX)
    with parts.part("devices of CUDA"):
        _compare(parts, visible, listed)
    names = parts.values.get("names", [])
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    free = ", ".join(f"{one / _GIB:.1f}" for one in parts.values.get("free bytes", []))
    return parts.result(f"{kinds}; {free} GiB free; torch {torch.__version__}, CUDA {torch.version.cuda}")


def _compare(parts: GpuParts, visible: tuple[str, ...], listed: tuple[Gpu, ...]) -> None:
    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(number) for number in range(count)]
    parts.record("names", [gpu_properties.name for gpu_properties in properties])
    parts.record("capability", [f"{gpu_properties.major}.{gpu_properties.minor}" for gpu_properties in properties])
    parts.record("processors", [gpu_properties.multi_processor_count for gpu_properties in properties])
    memory = [torch.cuda.mem_get_info(number) for number in range(count)]
    parts.record("free bytes", [free for free, _ in memory])
    parts.record("total bytes", [total for _, total in memory])
    parts.record("bfloat16", torch.cuda.is_bf16_supported())
    if count != len(visible):
        parts.failures.append(f"CUDA has {count} GPUs, embodyrl counts {len(visible)} ({', '.join(visible)})")
    uuids = [_get_uuid(gpu_properties) for gpu_properties in properties]
    parts.record("uuids of CUDA", uuids)
    if not listed:
        parts.warnings.append("nvidia-smi does not answer, so free memory and names are unknown before a run")
        return
    mig = [gpu for gpu in listed if gpu.is_mig]
    if mig:
        parts.warnings.append(f"GPU {mig[0].number} is in MIG mode: memory is read from CUDA, EGL renders on the CPU")
        return
    expected = [gpu.uuid for gpu in select_visible(listed)]
    if all(uuids) and sorted(uuids) != sorted(expected):
        parts.failures.append(f"CUDA's GPUs {uuids} are not those of nvidia-smi {expected}")
    elif all(uuids) and uuids != expected:
        parts.warnings.append("CUDA numbers GPUs differently from nvidia-smi: set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    low = [number for number, (free, total) in enumerate(memory) if free < 0.9 * total]
    if low:
        parts.warnings.append(f"less than 90 % of the memory is free on GPU {', '.join(map(str, low))}")


def _get_uuid(properties: object) -> str:
    """Return a GPU's UUID in the format of `nvidia-smi`; empty for versions of torch without UUIDs."""
    found = str(getattr(properties, "uuid", ""))
    return found if not found or found.startswith(("GPU-", "MIG-")) else f"GPU-{found}"


def details() -> str:
    """Return the output of `nvidia-smi` about driver, PCI, clocks and power, and its list of GPUs and MIG slices."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "there is no nvidia-smi"
    said = []
    for words in ([f"--query-gpu={_DETAIL_FIELDS}", "--format=csv"], ["-L"], ["topo", "-m"]):
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=20, check=False)
        said.append((done.stdout if done.returncode == 0 else done.stderr).strip())
    return "\n".join(said)
