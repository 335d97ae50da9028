"""GPU code on a fake GPU (see `fakegpu.py`), with `on_*.py` of this folder in a separate process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from mutants import BUGS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTEST = ("-m", "pytest", "-q", "-p", "fakegpu", "-p", "no:cacheprovider", "--timeout", "300")
PYTEST += ("-o", "faulthandler_timeout=0")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile torch's fake device guard and the hooks that report CUDA against the installed torch."""
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


def test_gpu_tests_pass_on_a_fake_gpu(guard: Path) -> None:
    done = on_fake_gpu(guard, *PYTEST, *map(str, sorted(HERE.glob("on_*.py"))))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_mutation_applies() -> None:
    for name, bug in BUGS.items():
        folder = ROOT if "." in bug.module else ROOT / "benchmarks"
        source = folder / f"{bug.module.replace('.', '/')}.py"
        assert source.read_text(encoding="utf-8").count(bug.old) == 1, name


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_seeded_bug_is_caught(guard: Path) -> None:
    done = on_fake_gpu(guard, str(HERE / "mutants.py"), timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") == 2 + len(BUGS), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_planned_memory_is_within_ten_percent(guard: Path) -> None:
    done = on_fake_gpu(guard, str(HERE / "rows.py"), "--layers", "2", timeout=3500)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines()[2:]]
    assert len(rows) == 36
    assert not [row for row in rows if abs(float(row[4].rstrip("%"))) > 10]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_optimizer_step_of_eight_long_replies_fits_25_gib(guard: Path) -> None:
    done = on_fake_gpu(guard, str(HERE / "rows.py"), "--only", "text, one micro-batch")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[2].split("|")[3]) <= 25.0


def on_fake_gpu(guard: Path, *words: str, timeout: float = 560) -> subprocess.CompletedProcess[str]:
    """Run Python with the guard installed."""
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    environ = {**os.environ, "PYTHONPATH": path, "FAKE_CUDA_GUARD": str(guard), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], env=environ, capture_output=True, text=True, check=False, timeout=timeout
    )
