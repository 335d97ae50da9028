"""Selection of MuJoCo's OpenGL backend: EGL on a GPU if it works, else OSMesa on the CPU."""

import ctypes.util
import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from embodyrl.devices import query_gpus, visible_gpus
from embodyrl.process_cleanup import get_signal_name

_TIMEOUT_S = 60.0
_SOFTWARE_RENDERERS = ("llvmpipe", "softpipe", "swrast")
_RENDER_SCRIPT = """
import mujoco, numpy
model = mujoco.MjModel.from_xml_string('''<mujoco><worldbody><light pos="0 0 3"/>
<geom type="plane" size="1 1 .1" rgba=".2 .3 .4 1"/><geom type="box" size=".2 .2 .2" pos="0 0 .2" rgba="1 0 0 1"/>
</worldbody></mujoco>''')
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 64, 64) as renderer:
    renderer.update_scene(data)
    frame = renderer.render()
    from OpenGL import GL
    print("one color" if len(numpy.unique(frame)) == 1 else "drawn by " + GL.glGetString(GL.GL_RENDERER).decode())
"""
EGL_TABLE_VARIABLE, _EGL_DEVICE_VARIABLE = "EMBODYRL_EGL_DEVICES", "MUJOCO_EGL_DEVICE_ID"
"""Names of environment variables: the EGL device index of each CUDA device (0:2,1:0), and MuJoCo's EGL device index."""
_EGL_CUDA_DEVICE = 0x323A
"""Value of the EGL constant EGL_CUDA_DEVICE_NV."""
_LIST_EGL_SCRIPT = f"""
import ctypes
egl = ctypes.CDLL("libEGL.so.1")
egl.eglGetProcAddress.restype = ctypes.c_void_p
def function(name, *types):
    return ctypes.CFUNCTYPE(ctypes.c_uint, *types)(egl.eglGetProcAddress(name))
handles, count, number = (ctypes.c_void_p * 64)(), ctypes.c_int(), ctypes.c_ssize_t()
list_devices = function(b"eglQueryDevicesEXT", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
attribute = function(b"eglQueryDeviceAttribEXT", ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
assert list_devices(64, handles, ctypes.byref(count))
for index in range(count.value):
    if attribute(handles[index], {_EGL_CUDA_DEVICE}, ctypes.byref(number)):
        print(f"{{number.value}}:{{index}}")
"""
_EGL_VENDOR_FOLDERS = "/etc/glvnd/egl_vendor.d:/usr/share/glvnd/egl_vendor.d"


@dataclass(frozen=True, slots=True)
class RenderResult:
    """Result of rendering a test frame."""

    driver: str = ""
    """Name of the OpenGL renderer (GL_RENDERER)."""
    problem: str = ""
    """Error message if no frame was rendered."""


@dataclass(frozen=True, slots=True)
class Renderer:
    """Selected OpenGL backend (value of MUJOCO_GL), with the reason."""

    backend: str
    reason: str
    fix: str = ""
    """Instruction for the user if a GPU cannot render."""


def choose_renderer() -> Renderer:
    """Select the OpenGL backend: MUJOCO_GL if set, else EGL if all visible GPUs can render, else OSMesa."""
    if backend := os.environ.get("MUJOCO_GL"):
        return Renderer(backend.lower(), "MUJOCO_GL is set")
    gpus = visible_gpus()
    if not gpus:
        return Renderer("osmesa", "there is no GPU")
    if hidden_gpus := [gpu for gpu in gpus if get_cuda_index(gpu) is None]:
        fix = "CUDA_VISIBLE_DEVICES=0,1,... (GPU numbers)"
        reason = f"EGL identifies GPUs by number, and {hidden_gpus[0]} is a MIG slice or not listed by nvidia-smi"
        return Renderer("osmesa", reason, fix)
    with ThreadPoolExecutor(len(gpus)) as pool:  # simulators are distributed over all GPUs
        frames = list(pool.map(lambda gpu: render_test_frame("egl", get_egl_device(gpu)), gpus))
    renderers = [check_egl(frame) for frame in frames]
    bad_index = next((number for number, renderer in enumerate(renderers) if renderer.backend != "egl"), None)
    if bad_index is None or len(gpus) == 1:
        return renderers[bad_index or 0]
    return Renderer("osmesa", f"{renderers[bad_index].reason} (GPU {gpus[bad_index]})", renderers[bad_index].fix)


def check_egl(frame: RenderResult) -> Renderer:
    """Return EGL if a GPU rendered the test frame, else OSMesa with the reason and a fix."""
    fix = "apt-get install libegl1 libglvnd0; in a container start it with NVIDIA_DRIVER_CAPABILITIES=all"
    folders = os.environ.get("__EGL_VENDOR_LIBRARY_DIRS", _EGL_VENDOR_FOLDERS).split(":")
    if not any(file for folder in folders for file in Path(folder).glob("*nvidia*.json")):
        fix += f"; NVIDIA's EGL is not registered: 10_nvidia.json is missing in {folders[-1]}"
    if frame.problem:
        return Renderer("osmesa", f"EGL does not render on the GPU: {frame.problem}", fix)
    if any(name in frame.driver for name in _SOFTWARE_RENDERERS):
        return Renderer("osmesa", f"EGL finds no GPU and selects {frame.driver}", fix)
    return Renderer("egl", "a GPU renders")


def get_cuda_index(gpu: str) -> int | None:
    """Return the CUDA device index of a GPU; None for an unknown id, or a MIG slice, which cannot render."""
    if gpu.isdigit():
        return int(gpu)
    return next((gpu_info.number for gpu_info in query_gpus() if gpu_info.uuid.startswith(gpu)), None)


def get_egl_device(gpu: str) -> str:
    """Return the EGL device index of a GPU, which can differ from the CUDA index; empty if unknown."""
    number = get_cuda_index(gpu)
    return "" if number is None else str(get_egl_devices().get(number, number))


def get_egl_devices() -> dict[int, int]:
    """Return the EGL device index of each CUDA device; empty if EGL does not report CUDA devices.

    The table is read once, by a process without CUDA_VISIBLE_DEVICES, which renumbers CUDA devices but not EGL devices.
    """
    if EGL_TABLE_VARIABLE not in os.environ:
        environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        command = [sys.executable, "-c", _LIST_EGL_SCRIPT]
        try:
            result = subprocess.run(
                command, env=environ, timeout=_TIMEOUT_S, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return {}
        os.environ[EGL_TABLE_VARIABLE] = ",".join(result.stdout.split()) if result.returncode == 0 else ""
    pairs = (pair.split(":") for pair in os.environ[EGL_TABLE_VARIABLE].split(",") if pair)
    return {int(cuda): int(egl) for cuda, egl in pairs}


def set_egl_device() -> None:
    """Set MuJoCo's EGL device (MUJOCO_EGL_DEVICE_ID) to the first visible GPU."""
    if (gpus := visible_gpus()) and (device := get_egl_device(gpus[0])):
        os.environ[_EGL_DEVICE_VARIABLE] = device


@contextmanager
def without_egl_device() -> Iterator[None]:
    """Remove MUJOCO_EGL_DEVICE_ID inside the block.

    On import, robosuite would read its value as a CUDA index.
    """
    device = os.environ.pop(_EGL_DEVICE_VARIABLE, None)
    try:
        yield
    finally:
        if device is not None:
            os.environ[_EGL_DEVICE_VARIABLE] = device


def get_render_environment(backend: str, device: str) -> dict[str, str]:
    """Return the environment variables of a process that renders with the given backend and EGL device."""
    # PyOpenGL keeps the platform of the first imported backend, also in child processes.
    environ = {name: value for name, value in os.environ.items() if name != "PYOPENGL_PLATFORM"}
    return environ | {"MUJOCO_GL": backend} | ({_EGL_DEVICE_VARIABLE: device} if device else {})


@functools.cache
def render_test_frame(backend: str, device: str = "") -> RenderResult:
    """Render a test frame in a separate process with a timeout, because a broken driver may crash or hang."""
    environ = get_render_environment(backend, device)
    command = [sys.executable, "-c", _RENDER_SCRIPT]
    try:
        result = subprocess.run(command, env=environ, timeout=_TIMEOUT_S, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        return RenderResult(problem=f"no frame within {_TIMEOUT_S:.0f} s")
    if result.returncode != 0:
        problem = get_signal_name(-result.returncode) if result.returncode < 0 else _find_first_error(result.stderr)
        return RenderResult(problem=problem)
    driver = result.stdout.strip().rpartition("drawn by ")[2]
    return RenderResult(problem="the frame has only one color") if driver == "one color" else RenderResult(driver)


def _find_first_error(output: str) -> str:
    """Return the message of the first exception in the output; later exceptions come from the cleanup."""
    lines = [line for line in output.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return lines[0] if lines else "no message"


def select_headless_backend() -> None:
    """Set MUJOCO_GL on a machine without a display, unless MUJOCO_GL is set or the backend cannot be loaded.

    Call this before a simulator is imported: MuJoCo chooses its backend at import, and some constructors render.
    """
    lacks_display = {"MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"}.isdisjoint(os.environ)
    if not lacks_display or os.name != "posix" or importlib.util.find_spec("mujoco") is None:
        return
    backend = choose_renderer().backend
    if importlib.util.find_spec("OpenGL") is not None and ctypes.util.find_library(
        {"egl": "EGL"}.get(backend, "OSMesa")
    ):
        os.environ["MUJOCO_GL"] = backend  # for child processes, too
        set_egl_device()
