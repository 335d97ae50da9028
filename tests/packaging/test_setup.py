"""The set-up script, its functions in a real shell with a real pip."""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from processes import SOURCE

pytestmark = pytest.mark.integration


def wheel(folder: Path, version: str) -> None:
    """An empty package that calls itself torch."""
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as file:
        file.writestr("torch/__init__.py", "")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with an environment in which nothing is installed, and the script without its last lines."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "constraints.txt").write_text("numpy==2.0.0\ntorch==2.13.0\n")
    venv.create(folder / ".venv", with_pip=True)
    functions = (SOURCE / "scripts" / "setup.sh").read_text().rpartition("\nsystem_libraries\n")[0]
    (folder / "scripts").mkdir()
    (folder / "scripts" / "setup.sh").write_text(functions)
    return folder


@pytest.mark.parametrize(
    ("build", "there", "taken", "said"),
    [
        ("cpu", ["2.13.0", "2.13.0+cpu"], "2.13.0+cpu", ""),
        ("cpu", ["2.13.0"], "2.13.0", "build for CPUs cannot be fetched (.venv/torch.log)"),
        ("auto", ["2.13.0"], "2.13.0", "torch's own host cannot be reached"),
    ],
    ids=["a CPU wheel for pip", "CUDA only", "a GPU"],
)
def test_without_torchs_own_host_a_wheel_that_pip_knows_is_preferred_and_a_large_one_announced(
    place: Path, tmp_path: Path, build: str, there: list[str], taken: str, said: str
) -> None:
    for version in there:
        wheel(tmp_path, version)
    done = subprocess.run(
        ["bash", "-c", f"source scripts/setup.sh; torch_from_elsewhere {build}"],
        cwd=place,
        env={
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PIP_FIND_LINKS": str(tmp_path),
            "PIP_NO_INDEX": "1",
        },
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    installed = [*place.glob(".venv/lib/*/site-packages/torch*")]
    assert {folder.name for folder in installed} == {"torch", f"torch-{taken}.dist-info"}
    for folder in installed:
        shutil.rmtree(folder)
    assert said in done.stdout if said else not done.stdout
    assert ("3 GB" in done.stdout) is bool(said)
