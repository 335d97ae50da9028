"""Paths, names and components that no command can use: each ends with an error for users, never "unexpected"."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodyrl.cli.main import main

CARTPOLE = ("env=gym", "env.id=CartPole-v1", "model=mlp", "algorithm=ppo", "launcher=inline", "runner.max_steps=1")
BROKEN = (
    "def wrap(env):\n    raise KeyError('w')\nclass Part:\n    def __init__(self, *args):\n        raise ValueError\n"
)
ARGUMENTS = [
    ["report", "a\0b"],
    ["data", "info", "a\0b"],
    ["ckpt", "ls", "a\0b"],
    ["eval", "ckpt=\udcff", "--dry-run"],
    ["train", *CARTPOLE, "model.path=a\0b", "--dry-run"],
    ["train", *CARTPOLE, "runner.output_dir=a\0b"],
    ["train", *CARTPOLE, "runner.output_dir=file"],
    ["train", *CARTPOLE, "runner.output_dir=/dev/null"],
    ["train", *CARTPOLE, "--config-dir", "file"],
    ["train", *CARTPOLE, "env.wrappers=[broken_part:wrap]", "--dry-run"],
    ["train", *CARTPOLE, "env.env_type=broken_part:Part", "--dry-run"],
    ["train", *CARTPOLE, "runner.logger.backends=[broken_part:Part]"],
    ["collect", "env=gym", "env.id=CartPole-v1", "model=random", "collect.out=file", "launcher=inline"],
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda arguments: ascii(" ".join(arguments[-2:])))
def test_unusable_arguments_are_errors_for_users(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("file").write_text("x")
    Path("broken_part.py").write_text(BROKEN)
    code, error = main(arguments), capsys.readouterr().err
    assert code in (1, 2, 6), error
    assert error.startswith("embodyrl: error: ")
    assert "unexpected" not in error
