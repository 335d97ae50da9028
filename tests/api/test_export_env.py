"""`embodyrl export-env`: a repository in LeRobot's EnvHub form, which passes check-env."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from embodyrl.cli.main import main


@pytest.mark.integration
def test_exported_environment_passes_check_env(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export-env", "tabletop", str(tmp_path / "repo"), "env.eval.max_episode_steps=40"]) == 0
    (tmp_path / "repo" / "env.py").rename(tmp_path / "exported_env.py")
    assert (tmp_path / "repo" / "requirements.txt").read_text().startswith("embodyrl==")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    capsys.readouterr()
    assert main(["check-env", "env=gym", "env.id=exported_env:make_env", "env.train.max_episode_steps=40"]) == 0
    assert "24 checks ok, 0 failed, 0 skipped" in capsys.readouterr().out


def test_options_of_config_dir_are_exported(tmp_path: Path) -> None:
    """The exported file named an option that did not exist on other machines."""
    options = tmp_path / "conf"
    (options / "env").mkdir(parents=True)
    small = "env_type: tabletop\ninit_params: {camera_heights: 64, camera_widths: 64, camera_names: [front]}\n"
    (options / "env" / "small_table.yaml").write_text(small)
    (options / "notes.txt").write_text("private")
    repo = tmp_path / "repo"
    assert main(["export-env", "small_table", str(repo), "--config-dir", str(options)]) == 0
    assert sorted(path.name for path in (repo / "conf").rglob("*.*")) == ["small_table.yaml"]
    shutil.rmtree(options)
    spec = importlib.util.spec_from_file_location("small_table_env", repo / "env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    env = module.make_env(1)
    assert env.reset(seed=0)[0]["pixels"]["front"].shape == (1, 64, 64, 3)
    env.close()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["tabletop"], "takes an environment and a folder"),
        (["no_env", "out"], "no_env"),
        (["tabletop", "."], "already exists"),
        (["tabletop", f"{__file__}/out"], "test_export_env.py: File exists. Choose another folder."),
        (["text/copy", "out"], "is a text task without steps"),
    ],
)
def test_invalid_export_env_arguments_are_rejected(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export-env", *words]) == 2
    assert error in capsys.readouterr().err
