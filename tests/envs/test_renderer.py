"""EGL where a GPU draws with it, OSMesa elsewhere, and the reason; the probe survives drivers that do not."""

from __future__ import annotations

import os

import pytest

from embodyrl.envs import renderer
from embodyrl.envs.renderer import Frame, choose_device, choose_renderer, draw_frame, judge_egl

pytest.importorskip("mujoco")


@pytest.mark.parametrize(
    ("frame", "backend", "words"),
    [
        (Frame("NVIDIA H100/PCIe/SSE2"), "egl", "a GPU draws"),
        (Frame("llvmpipe (LLVM 15.0.6, 256 bits)"), "osmesa", "reaches no GPU, llvmpipe"),
        (Frame(problem="SIGSEGV"), "osmesa", "does not draw on the GPU: SIGSEGV"),
    ],
)
def test_egl_is_preferred_where_a_gpu_draws(frame, backend, words):
    chosen = judge_egl(frame)
    assert (chosen.backend, words in chosen.why, bool(chosen.fix)) == (backend, True, backend == "osmesa")


def test_the_users_word_counts_and_without_a_gpu_nothing_is_probed(monkeypatch):
    probes = draw_frame.cache_info().misses
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    assert choose_renderer() == renderer.Renderer("osmesa", "there is no GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1a2b")
    assert "by number" in choose_renderer().fix
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert choose_renderer().backend == "egl"
    assert draw_frame.cache_info().misses == probes


def test_a_gpu_that_is_none_is_found_out_by_drawing(monkeypatch):
    """The host claims a GPU that is not there: EGL draws in software, or not at all."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    chosen = choose_renderer()
    assert chosen.backend == "osmesa"
    assert "NVIDIA_DRIVER_CAPABILITIES" in chosen.fix


def test_a_probe_that_hangs_or_crashes_is_a_reason(monkeypatch):
    monkeypatch.setattr(renderer, "_TIMEOUT_S", 0.01)
    assert "no frame within" in draw_frame("hangs").problem
    monkeypatch.setattr(renderer, "_TIMEOUT_S", 60.0)
    monkeypatch.setattr(renderer, "_SCENE", "import os; os.kill(os.getpid(), 11)")
    assert draw_frame("crashes").problem == "SIGSEGV"


@pytest.mark.parametrize(
    ("visible", "wanted", "device"),
    [("3", "", "3"), ("3", "0", "3"), ("2,3", "3", "3"), ("", "", ""), ("GPU-1", "1", "1")],
)
def test_a_worker_draws_on_the_gpu_that_it_sees(visible, wanted, device, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", wanted)
    choose_device()
    assert os.environ["MUJOCO_EGL_DEVICE_ID"] == device
