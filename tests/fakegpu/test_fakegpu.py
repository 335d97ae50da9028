"""The code for GPUs on one that is not there (see `fakegpu.py`): each `on_*.py` beside this file in its own process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """torch's own fake device guard and hooks that say CUDA is there, compiled against the installed torch."""
    import torch

    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler (c++, g++ or clang++): fake CUDA tensors need a device guard")
    if torch.version.cuda is not None:
        pytest.skip("torch is built for CUDA, whose own device guard is in the way: the fake GPU wants the CPU build")
    root = Path(torch.__file__).parent
    library = tmp_path_factory.mktemp("guard") / "libfakecuda.so"
    include = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    link = [f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"]
    words = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", *include, str(HERE / "guard.cpp"), "-o", str(library)]
    done = subprocess.run([*words, *link], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return library


@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("on_*.py")))
def test_gpu_code(file: str, guard: Path) -> None:
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    environ = {**os.environ, "PYTHONPATH": path, "FAKE_CUDA_GUARD": str(guard), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "fakegpu", "-p", "no:cacheprovider", str(HERE / file)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
