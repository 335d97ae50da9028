"""Which OpenGL draws MuJoCo's pictures on this machine: a GPU's by EGL where that works, else the CPU's by OSMesa."""

import functools
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass

from embodyrl.devices import visible_gpus

_TIMEOUT_S = 60.0
_SOFTWARE = ("llvmpipe", "softpipe", "swrast")
_SCENE = """
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
    print("one colour" if len(numpy.unique(frame)) == 1 else "drawn by " + GL.glGetString(GL.GL_RENDERER).decode())
"""


@dataclass(frozen=True, slots=True)
class Frame:
    """What became of one frame."""

    driver: str = ""
    """Who drew it, in the words of OpenGL."""
    problem: str = ""
    """Why there is none."""


@dataclass(frozen=True, slots=True)
class Renderer:
    """A value of MUJOCO_GL and its reason."""

    backend: str
    why: str
    fix: str = ""
    """How a GPU that does not draw could."""


def choose_renderer() -> Renderer:
    """MUJOCO_GL as the user set it; else EGL where there is a GPU that draws with it, else OSMesa."""
    if chosen := os.environ.get("MUJOCO_GL"):
        return Renderer(chosen.lower(), "MUJOCO_GL says so")
    gpus = visible_gpus()
    if not gpus:
        return Renderer("osmesa", "there is no GPU")
    if not gpus[0].isdigit():
        fix = "CUDA_VISIBLE_DEVICES=0,1,... by number"
        return Renderer("osmesa", "CUDA_VISIBLE_DEVICES names its GPUs by id, EGL knows them by number", fix)
    return judge_egl(draw_frame("egl", gpus[0]))


def judge_egl(frame: Frame) -> Renderer:
    """Prefer EGL if a GPU drew with it."""
    fix = "apt-get install libegl1 libglvnd0; in a container start it with NVIDIA_DRIVER_CAPABILITIES=all"
    if frame.problem:
        return Renderer("osmesa", f"EGL does not draw on the GPU: {frame.problem}", fix)
    if any(name in frame.driver for name in _SOFTWARE):
        return Renderer("osmesa", f"EGL reaches no GPU, {frame.driver} answers", fix)
    return Renderer("egl", "a GPU draws")


def choose_device() -> None:
    """Let EGL draw on the first GPU that this process sees: robosuite refuses one that CUDA_VISIBLE_DEVICES hides."""
    if (gpus := visible_gpus()) and gpus[0].isdigit() and os.environ.get("MUJOCO_EGL_DEVICE_ID") not in gpus:
        os.environ["MUJOCO_EGL_DEVICE_ID"] = gpus[0]


@functools.cache
def draw_frame(backend: str, device: str = "") -> Frame:
    """Draw in a process of its own, within a minute: a broken driver may crash or hang, but not us."""
    environ = {**os.environ, "MUJOCO_GL": backend} | ({"MUJOCO_EGL_DEVICE_ID": device} if device else {})
    command = [sys.executable, "-c", _SCENE]
    try:
        done = subprocess.run(command, env=environ, timeout=_TIMEOUT_S, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        return Frame(problem=f"no frame within {_TIMEOUT_S:.0f} s")
    if done.returncode != 0:
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else _first_error(done.stderr)
        return Frame(problem=how)
    driver = done.stdout.strip().rpartition("drawn by ")[2]
    return Frame(problem="a frame of one colour") if driver == "one colour" else Frame(driver)


def _first_error(output: str) -> str:
    """The exception that came first; clean-up of a half-built renderer raises more of them later."""
    lines = [line for line in output.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return lines[0] if lines else "no message"
