"""`embodyrl export-env`: a repository in LeRobot's EnvHub form, which passes check-env."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodyrl.cli.main import main


@pytest.mark.needs("tabletop")
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


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["tabletop"], "takes an environment and an output folder"),
        (["no_env", "out"], "no_env"),
        (["tabletop", "."], "exists already"),
        (["tabletop", f"{__file__}/out"], "test_export_env.py: File exists. Choose another folder."),
        (["text/copy", "out"], "is a text task without steps"),
    ],
)
def test_invalid_export_env_arguments_are_refused(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export-env", *words]) == 2
    assert error in capsys.readouterr().err
