"""Environments of the hub: env.py of a repository, downloaded at a commit, with trust=true only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, Repository
from huggingface_hub import constants

from embodyrl.cli.main import main
from embodyrl.config.trust import find_untrusted_values
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config

COMMIT, BROKEN = "a" * 40, "b" * 40
PROGRAM = b"""
import gymnasium
from helper import KIND

def make_env(n_envs=1, use_async_envs=False, cfg=None):
    return gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(KIND)] * n_envs)
"""
FILES = {"env.py": PROGRAM, "helper.py": b"KIND = 'CartPole-v1'\n", "README.md": b"cart"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Start a hub server with an empty cache, which child processes use too."""
    hub = Hub()
    cache = str(tmp_path / "cache")
    address = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    settings = {"ENDPOINT": hub.url, "HF_HUB_CACHE": cache, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}
    for name, value in {**settings, "HUGGINGFACE_CO_URL_TEMPLATE": address}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_HUB_CACHE", cache)
    monkeypatch.chdir(tmp_path)
    broken = {"env.py": b"raise OSError('no display')\n"}
    commits = {COMMIT: FILES, BROKEN: broken, "c" * 40: {"a.txt": b""}}
    hub.repositories["model", "me/cart"] = Repository(commits, {"main": COMMIT, "v1": COMMIT})
    yield hub
    hub.shutdown()
    hub.server_close()


def words(name: str, *more: str) -> list[str]:
    return ["env=gym", f"env.id={name}", *more]


def test_hub_environment_is_pinned_and_passes_check_env(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = load_config("check-env", words("me/cart@main", "trust=true"))
    assert cfg.env.id == f"me/cart@{COMMIT}"
    assert main(["check-env", *words("me/cart@v1", "trust=true", "env.train.max_episode_steps=60")]) == 0
    said = capsys.readouterr().out
    assert f"me/cart@{COMMIT}" in said
    assert "24 checks ok, 0 failed, 0 skipped" in said


def test_hub_environment_needs_trust(hub: Hub) -> None:
    with pytest.raises(ConfigError, match=r"env.id=me/cart@main downloads a program from the hub .* add trust=true"):
        load_config("check-env", words("me/cart@main"))
    assert hub.sent == []


def test_saved_config_with_a_hub_environment_needs_trust() -> None:
    saved = {"env.id": f"me/cart@{COMMIT}", "model.path": f"me/model@{COMMIT}"}
    (problem,) = find_untrusted_values(saved, {}, Path("config.yaml"))
    assert "env.id" in problem
    assert find_untrusted_values(saved, {"trust": True}, Path("config.yaml")) == []


@pytest.mark.parametrize(
    ("revision", "error"),
    [
        (BROKEN, r"env.py cannot be imported: OSError: no display"),
        ("c" * 40, r"has no env.py \(files: a.txt\)"),
        ("other", r"denies access or has no such repository or revision"),
    ],
)
def test_unusable_hub_environment_is_rejected(
    hub: Hub, revision: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-env", *words(f"me/cart@{revision}", "trust=true")]) != 0
    said = capsys.readouterr()
    assert re.search(error, said.out + said.err)


def test_error_for_a_missing_commit_suggests_name_at_commit(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", *words("me/cart")]) != 0
    said = capsys.readouterr()
    assert "env.id=me/cart@COMMIT trust=true" in said.out + said.err
