"""The model folder of vLLM, whose path is part of the compile cache key."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("fcntl")

from embodyrl.policies.causal_lm.engine import create_model_folder


def writer(config: str, weights: str = ""):
    def save(folder: Path) -> None:
        (folder / "config.json").write_text(config)
        (folder / "model.safetensors").write_text(weights)

    return save


def test_engine_folder_path_depends_on_the_config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = []
    for config, weights in (("a", "1"), ("a", "2"), ("b", "1")):
        with create_model_folder(writer(config, weights)) as folder:
            paths.append(folder)
            assert (folder / "model.safetensors").read_text() == weights
    assert paths[0] == paths[1] != paths[2]
    assert not [path for path in tmp_path.rglob("*") if path.suffix != ".lock" and path.is_file()]


def test_failed_engine_start_removes_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError), create_model_folder(writer("a")):
        raise RuntimeError
    assert not list(tmp_path.rglob("*.safetensors"))


def test_engines_start_one_after_another(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen, first_in = [], threading.Event()

    def second() -> None:
        first_in.wait(60)
        with create_model_folder(writer("a", "2")) as folder:
            seen.append((folder / "model.safetensors").read_text())

    thread = threading.Thread(target=second)
    thread.start()
    with create_model_folder(writer("a", "1")) as folder:
        first_in.set()
        assert (folder / "model.safetensors").read_text() == "1"
        seen.append("1")
    thread.join(60)
    assert seen == ["1", "2"]
