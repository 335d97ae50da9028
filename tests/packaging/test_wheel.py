"""The wheel: built without network, installed separately and used outside of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from toy_runs import TOY, rows

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SHIPPED = (
    "embodyrl/conf/train.yaml",
    "embodyrl/conf/env/libero_10.yaml",
    "embodyrl/assets/openvla_oft_tiny/config.json",
    "embodyrl/assets/openvla_oft_tiny/tokenizer.json",
    "embodyrl/cli/main.py",
)

pytestmark = pytest.mark.integration


def run(*command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=110, check=False
    )


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Build the source distribution, and the wheel from it."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    wheel = next(dist.glob("*.whl"))
    done = run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)),
        str(wheel),
        cwd=dist,
    )
    assert done.returncode == 0, done.stderr
    return target


def use(installed: Path, cwd: Path, *args: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script of the installed command, with the installed package first on the path."""
    python_path = f"{installed}:{path}" if path else str(installed)
    return run(sys.executable, str(installed / "bin" / "embodyrl"), *args, cwd=cwd, PYTHONPATH=python_path)


def test_wheel_contains_configs_and_assets_without_tests(dist):
    names = zipfile.ZipFile(next(dist.glob("*.whl"))).namelist()
    assert set(SHIPPED) <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"embodyrl"}
    assert any(name.endswith("LICENSE") for name in names)


def test_every_config_and_asset_of_the_sources_is_in_the_wheel(dist):
    names = set(zipfile.ZipFile(next(dist.glob("*.whl"))).namelist())
    listed = run("git", "ls-files", "conf", "assets", "embodyrl", cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout")
    sources = [n if n.startswith("embodyrl/") else f"embodyrl/{n}" for n in listed.stdout.splitlines()]
    assert [name for name in sources if name not in names and (ROOT / name.removeprefix("embodyrl/")).exists()] == []


def test_source_distribution_contains_all_files(dist):
    names = tarfile.open(next(dist.glob("*.tar.gz"))).getnames()
    inside = {name.partition("/")[2] for name in names}
    needed = {"pyproject.toml", "README.md", "LICENSE", "conf/train.yaml", "tests/conftest.py"}
    assert needed | {"assets/openvla_oft_tiny/config.json"} <= inside


def test_installed_package_is_imported_instead_of_the_checkout(installed, tmp_path):
    code = "import embodyrl, embodyrl.config.paths as p; print(embodyrl.__file__)"
    done = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(installed))
    assert done.stdout.startswith(str(installed))


def test_list_and_show_commands_work_from_the_wheel(installed, tmp_path):
    listed = use(installed, tmp_path, "list", "envs")
    assert listed.returncode == 0, listed.stderr
    assert "libero_10" in listed.stdout
    shown = use(installed, tmp_path, "show", "env=libero_10")
    assert shown.returncode == 0, shown.stderr
    assert "task_suite_name" in shown.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_command_starts_without_heavy_imports(installed, tmp_path):
    code = "import sys, embodyrl.cli.main; print([m for m in ('torch', 'numpy', 'hydra') if m in sys.modules])"
    done = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(installed))
    assert done.stdout.strip() == "[]", done.stderr


def test_training_step_runs_from_the_wheel(installed, tmp_path):
    words = (*TOY, "runner.max_steps=1", "runner.experiment_name=run", "launcher.env_workers=1")
    done = use(installed, tmp_path, "train", *words, path=str(TESTS))
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(tmp_path / "runs" / "run")] == [1]
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step_000001" / "manifest.json").is_file()
