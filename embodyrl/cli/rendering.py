"""Probes of `doctor` that start a program: render one real frame, start Vulkan, run the video encoder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

from embodyrl.cli.probes import Finding, installed_version
from embodyrl.envs.maniskill.install import INSTALL, VULKAN_CURE, vulkan_problem

_TIMEOUT_S = 60.0
_APT = {
    "osmesa": "apt-get install libosmesa6",
    "egl": "apt-get install libegl1 libgl1-mesa-dri; on a headless CPU machine use MUJOCO_GL=osmesa",
}
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
print("distinct values:", len(numpy.unique(frame)))
"""


def probe_rendering() -> Finding:
    """Render one MuJoCo frame in a process of its own: a broken driver may crash or hang, but not us.

    The backend is `MUJOCO_GL`, or osmesa, which needs no display and no GPU.
    """
    backend = os.environ.get("MUJOCO_GL") or "osmesa"
    version = installed_version("mujoco")
    if version is None:
        return Finding("rendering", "warn", "mujoco is not installed", "pip install 'embodyrl[libero]'")
    name = f"mujoco {version} with MUJOCO_GL={backend}"
    fix = _APT.get(backend, "MUJOCO_GL=osmesa (CPU) or MUJOCO_GL=egl (GPU)")
    environ = {**os.environ, "MUJOCO_GL": backend}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SCENE], env=environ, timeout=_TIMEOUT_S, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("rendering", "FAIL", f"{name} did not finish a frame in {_TIMEOUT_S:.0f} s", fix)
    if done.returncode != 0:
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else _first_error(done.stderr)
        return Finding("rendering", "FAIL", f"{name} cannot render: {how}", fix)
    if "distinct values: 1\n" in done.stdout:
        return Finding("rendering", "FAIL", f"{name} renders a frame of one colour", fix)
    return Finding("rendering", "ok", f"{name} renders")


def probe_vulkan() -> Finding:
    """Start SAPIEN's renderer, without which ManiSkill does not even simulate."""
    version = installed_version("sapien")
    if version is None:
        return Finding("vulkan", "warn", "sapien is not installed, which ManiSkill needs", INSTALL)
    problem = vulkan_problem()
    if problem:
        return Finding("vulkan", "warn", f"sapien {version} cannot start, so ManiSkill cannot: {problem}", VULKAN_CURE)
    return Finding("vulkan", "ok", f"sapien {version} draws")


def probe_video() -> Finding:
    """The encoder that imageio brings along starts."""
    fix = "pip install 'imageio[ffmpeg]'"
    try:
        from imageio_ffmpeg import get_ffmpeg_exe, get_ffmpeg_version

        version, program = get_ffmpeg_version(), get_ffmpeg_exe()
    except (ImportError, RuntimeError, OSError) as error:
        return Finding("video", "FAIL", f"no ffmpeg: {error}", fix)
    return Finding("video", "ok", f"ffmpeg {version} ({program})")


def _first_error(output: str) -> str:
    """The exception that came first; clean-up of a half-built renderer raises more of them later."""
    lines = [line for line in output.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return lines[0] if lines else "no message"
