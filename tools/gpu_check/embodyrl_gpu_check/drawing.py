"""GPU check of EGL rendering: devices, a test frame, frames per second of several processes, and GPU memory."""

import subprocess
import sys
from importlib.util import find_spec

from embodyrl.devices import query_gpus, select_visible, visible_gpus
from embodyrl.envs.mujoco_rendering import (
    check_egl,
    get_cuda_index,
    get_egl_device,
    get_egl_devices,
    get_render_environment,
    render_test_frame,
)
from embodyrl.files import available_cores
from embodyrl_gpu_check.result import GpuParts, GpuResult

_MIB = 2**20
_MAX_PROCESSES = 32
"""Maximum number of concurrent rendering processes in the measurement."""
_MIN_SPEEDUP = 1.5
"""Minimum speed-up of several processes over one process; a lower speed-up is noted in the report."""
_FRAMES = """
import sys, time
import mujoco
model = mujoco.MjModel.from_xml_string('''<mujoco><visual><global offwidth="224" offheight="224"/></visual><worldbody>
<light pos="0 0 3"/><geom type="plane" size="2 2 .1" rgba=".2 .3 .4 1"/>
<replicate count="64" euler="0 0 5.6"><geom type="capsule" size=".04 .2" pos=".6 0 .3"/></replicate>
</worldbody></mujoco>''')
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 224, 224) as renderer:
    def frame():
        renderer.update_scene(data)
        return renderer.render()
    frame()
    print("ready", flush=True)
    sys.stdin.readline()
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < 2.0:
        frame()
        count += 1
    print(count / (time.perf_counter() - started), flush=True)
"""


def check_drawing() -> GpuResult:
    """Check EGL rendering on each visible GPU, and measure the speed on one GPU."""
    parts, gpus = GpuParts(), visible_gpus()
    table = get_egl_devices()
    parts.record("EGL devices by CUDA number", table)
    if not table:
        parts.warnings.append("EGL reports no CUDA device (EGL_CUDA_DEVICE_NV), so CUDA's numbers are used")
    elif missing := [gpu for gpu in gpus if get_cuda_index(gpu) not in table]:
        parts.warnings.append(f"EGL does not list GPU {', '.join(missing)}; it lists CUDA's {sorted(table)}")
    if find_spec("mujoco") is None:
        text = f"mujoco is not installed, so nothing was rendered; EGL devices by CUDA number: {table or 'none'}"
        return GpuResult(level="skip", text="; ".join([*parts.warnings, text]), values=parts.values)
    fix, working = "", list[str]()
    for gpu in gpus:
        frame = render_test_frame("egl", get_egl_device(gpu))
        choice = check_egl(frame)
        parts.record(f"frame on GPU {gpu}", frame.problem or frame.driver)
        if choice.backend == "egl":
            working.append(gpu)
        else:
            parts.failures.append(f"GPU {gpu}: {choice.reason}")
            fix = choice.fix
    lines = [f"GPU {', '.join(working)} renders with EGL"] if working else []
    for gpu in working[:1]:
        with parts.part(f"frames per second on GPU {gpu}"):
            lines.append(measure_frames(parts, "egl", get_egl_device(gpu), gpu))
    return parts.result("; ".join(lines), fix)


def measure_frames(parts: GpuParts, backend: str, device: str, gpu: str) -> str:
    """Measure the frames per second of 1 process, of 8 and of one per core, and the GPU memory per process."""
    cores, lines, rates = min(available_cores(), _MAX_PROCESSES), list[str](), list[float]()
    for count in sorted({1, min(8, cores), cores}):
        before = _get_free_memory(gpu)
        rate, while_running = _measure_rate(backend, device, count, gpu)
        rates.append(rate)
        parts.record(f"frames/s of {count} processes in total", round(rate, 1))
        lines.append(f"{rate:.0f} frames/s in total with {count} process{'es' * (count > 1)}")
        if before and while_running:
            context = (before - while_running) / count / _MIB
            parts.record(f"MiB per context, {count} processes", round(context, 1))
            lines[-1] += f" ({context:.0f} MiB each)"
    if len(rates) > 1 and max(rates) < _MIN_SPEEDUP * rates[0]:
        lines.append("more processes do not render faster")
    return ", ".join(lines)


def _get_free_memory(gpu: str) -> int:
    """Return the free memory of a GPU in bytes; 0 if unknown."""
    number = visible_gpus().index(gpu) if gpu in visible_gpus() else -1
    selected = select_visible(query_gpus())
    return selected[number].free if 0 <= number < len(selected) else 0


def _measure_rate(backend: str, device: str, count: int, gpu: str) -> tuple[float, int]:
    """Return the total frames per second of `count` processes, and the free GPU memory while the processes run."""
    environ = get_render_environment(backend, device)
    command = [sys.executable, "-c", _FRAMES]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, env=environ, **pipes) for _ in range(count)]
    try:
        # The check itself has a deadline, after which its children are killed.
        replies = [process.stdout.readline() for process in running if process.stdout]
        if replies != ["ready\n"] * count:
            raise RuntimeError(f"only {replies.count('ready' + chr(10))} of {count} rendering processes started")
        free_bytes = _get_free_memory(gpu)
        for process in running:
            if process.stdin:
                process.stdin.write("\n")
                process.stdin.flush()
        return sum(float(process.stdout.readline()) for process in running if process.stdout), free_bytes
    finally:
        for process in running:
            process.kill()
            process.communicate()
