"""EGL rendering on GPUs, OSMesa otherwise, and a probe that tolerates broken drivers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from gpu_host import H100, stub_nvidia_smi

from embodyrl.envs import mujoco_rendering as renderer
from embodyrl.envs.mujoco_rendering import RenderResult, check_egl, choose_renderer, render_test_frame, set_egl_device

pytest.importorskip("mujoco")


@pytest.mark.parametrize(
    ("frame", "backend", "words"),
    [
        (RenderResult("NVIDIA H100/PCIe/SSE2"), "egl", "a GPU renders"),
        (RenderResult("llvmpipe (LLVM 15.0.6, 256 bits)"), "osmesa", "finds no GPU and selects llvmpipe"),
        (RenderResult(problem="SIGSEGV"), "osmesa", "does not render on the GPU: SIGSEGV"),
    ],
)
def test_egl_is_preferred_if_a_gpu_renders(frame, backend, words):
    chosen = check_egl(frame)
    assert (chosen.backend, words in chosen.reason, bool(chosen.fix)) == (backend, True, backend == "osmesa")


def test_explicit_renderer_or_missing_gpu_skips_the_probe(monkeypatch):
    probes = render_test_frame.cache_info().misses
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    assert choose_renderer() == renderer.Renderer("osmesa", "there is no GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,MIG-1a2b")
    assert "GPU numbers" in choose_renderer().fix
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert choose_renderer().backend == "egl"
    assert render_test_frame.cache_info().misses == probes


def test_missing_gpu_is_detected_by_rendering(monkeypatch):
    """The host reports a GPU that does not exist: EGL renders in software or fails."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    chosen = choose_renderer()
    assert chosen.backend == "osmesa"
    assert "NVIDIA_DRIVER_CAPABILITIES" in chosen.fix


def test_probe_ignores_the_imported_opengl_platform(monkeypatch):
    monkeypatch.setenv("PYOPENGL_PLATFORM", "egl")
    render_test_frame.cache_clear()
    assert render_test_frame("osmesa").driver


def test_every_gpu_must_be_able_to_render(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv(renderer.EGL_TABLE_VARIABLE, "0:4,1:3,2:5")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    drawn = []

    def draw(backend, device):
        drawn.append(device)
        return (
            RenderResult(problem="must be an integer between 0 and 4, got 5")
            if device == "5"
            else RenderResult("NVIDIA H100")
        )

    monkeypatch.setattr(renderer, "render_test_frame", draw)
    chosen = choose_renderer()
    assert (chosen.backend, sorted(drawn)) == ("osmesa", ["3", "4", "5"])
    assert "(GPU 2)" in chosen.reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert choose_renderer().backend == "egl"


def test_egl_devices_are_queried_once_for_child_processes(monkeypatch):
    monkeypatch.delenv(renderer.EGL_TABLE_VARIABLE, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(
        renderer, "_LIST_EGL_SCRIPT", "import os; print('0:1'); print('CUDA_VISIBLE_DEVICES' in os.environ or '1:0')"
    )
    assert renderer.get_egl_device("1") == "0"
    assert os.environ.pop(renderer.EGL_TABLE_VARIABLE) == "0:1,1:0"
    monkeypatch.setattr(renderer, "_LIST_EGL_SCRIPT", "raise OSError")
    assert renderer.get_egl_device("1") == "1", "a host without EGL"


@pytest.mark.integration
def test_egl_devices_can_be_queried(monkeypatch):
    """Uses the EGL of this host, if installed; software devices have no CUDA number."""
    monkeypatch.delenv(renderer.EGL_TABLE_VARIABLE, raising=False)
    assert set(renderer.get_egl_devices()) <= set(range(64))
    done = subprocess.run(
        [sys.executable, "-c", renderer._LIST_EGL_SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or "libEGL.so.1" in done.stderr


def test_missing_vendor_file_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_DIRS", str(tmp_path))
    assert f"10_nvidia.json is missing in {tmp_path}" in check_egl(RenderResult(problem="no display")).fix
    (tmp_path / "10_nvidia.json").touch()
    assert "10_nvidia" not in check_egl(RenderResult(problem="no display")).fix


@pytest.mark.integration
def test_robosuite_imports_with_egl_device_set(monkeypatch):
    """Its import rejects a number that is not in CUDA_VISIBLE_DEVICES."""
    pytest.importorskip("robosuite")
    code = (
        "from embodyrl.envs.mujoco_rendering import set_egl_device, without_egl_device\n"
        "import os\nset_egl_device()\n"
        "with without_egl_device():\n    import robosuite.utils.binding_utils\n"
        "print(os.environ['MUJOCO_EGL_DEVICE_ID'])"
    )
    environ = {name: value for name, value in os.environ.items() if name != "PYOPENGL_PLATFORM"}
    environ |= {"CUDA_VISIBLE_DEVICES": "1", renderer.EGL_TABLE_VARIABLE: "1:3", "MUJOCO_GL": "osmesa"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.split()[-1:] == ["3"], done.stderr


def test_hanging_or_crashing_probe_is_reported(monkeypatch):
    monkeypatch.setattr(renderer, "_TIMEOUT_S", 0.01)
    assert "no frame within" in render_test_frame("hangs").problem
    monkeypatch.setattr(renderer, "_TIMEOUT_S", 60.0)
    monkeypatch.setattr(renderer, "_RENDER_SCRIPT", "import os; os.kill(os.getpid(), 11)")
    assert render_test_frame("crashes").problem == "SIGSEGV"


@pytest.mark.parametrize(
    ("visible", "wanted", "device"),
    [
        ("3", "", "1"),
        ("3", "0", "1"),
        ("2,3", "3", "5"),
        ("9", "", "9"),
        ("", "", ""),
        ("GPU-b", "", "3"),
        ("MIG-1", "7", "7"),
    ],
)
def test_worker_renders_on_its_visible_gpu(visible, wanted, device, monkeypatch, tmp_path):
    """EGL lists seven GPUs in its own order (mujoco issue 3245), and omits one."""
    stub_nvidia_smi(tmp_path, monkeypatch, H100, ("1", "GPU-b", *H100[2:]))
    monkeypatch.setenv(renderer.EGL_TABLE_VARIABLE, "0:4,1:3,2:5,3:1,4:0,5:2,6:6")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", wanted)
    set_egl_device()
    assert os.environ["MUJOCO_EGL_DEVICE_ID"] == device
