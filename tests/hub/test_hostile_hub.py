"""A hub that lists files outside the repository or sends wrong content is rejected; only the cache changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hub_server import Hub, Repository
from huggingface_hub import constants

from embodyrl.errors import ConfigError
from embodyrl.hub import download

COMMIT = "a" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    address = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    settings = {"ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "home/cache"), "HF_HUB_OFFLINE": False}
    for name, value in {**settings, "HF_HUB_DISABLE_XET": True, "HUGGINGFACE_CO_URL_TEMPLATE": address}.items():
        monkeypatch.setattr(constants, name, value)
    yield hub
    hub.shutdown()
    hub.server_close()


def outside(folder: Path) -> set[str]:
    """Return the files that are not below the cache."""
    cache = folder / "home/cache"
    return {str(path) for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(cache)}


@pytest.mark.parametrize(
    "name",
    [
        "../evil.json",
        "../../../../evil.json",
        "a/../../../../../evil.json",
        "..\\..\\..\\evil.json",
        "{folder}/evil.json",
    ],
)
def test_file_outside_the_repository_is_not_written(hub, tmp_path, name):
    name = name.format(folder=tmp_path)
    hub.repositories["model", "me/evil"] = Repository({COMMIT: {name: b"{}", "config.json": b"{}"}}, {"main": COMMIT})
    with suppress(ConfigError):  # or it is stored below another name
        download("model.path", "me/evil", "model", False)
    assert outside(tmp_path) == set()


@pytest.mark.parametrize("commit", ["../../../evil", "main", "A" * 40, ""])
def test_invalid_commit_from_the_hub_is_rejected(hub, tmp_path, commit):
    hub.repositories["model", "me/evil"] = Repository({commit: {"config.json": b"{}"}}, {"main": commit})
    with pytest.raises(ConfigError, match="me/evil"):
        download("model.path", "me/evil", "model", False)
    assert outside(tmp_path) == set()


def test_symlink_in_a_hub_repository_is_downloaded_as_text(hub, tmp_path):
    """Git stores a link as a file with the path of its target."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/secret").write_text("secret")
    hub.repositories["model", "me/evil"] = Repository(
        {COMMIT: {"config.json": str(tmp_path / "home/secret").encode()}}, {"main": COMMIT}
    )
    assert download("model.path", "me/evil", "model", False) == f"me/evil@{COMMIT}"
    (found,) = (tmp_path / "home/cache").rglob("snapshots/*/config.json")
    assert found.read_text() == str(tmp_path / "home/secret")
