"""Weight files of model folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from embodyrl.errors import CheckpointError
from embodyrl.text.model_folder import find_missing_weights, list_weight_files


def test_incomplete_weights_are_reported(tmp_path: Path) -> None:
    assert "contains no *.safetensors" in (find_missing_weights(tmp_path) or "")
    (tmp_path / "a.safetensors").touch()
    assert find_missing_weights(tmp_path) is None
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}')
    assert "lacks 1 of 2 weight files, such as b.safetensors" in (find_missing_weights(tmp_path) or "")
    index.write_text('{"weight_map": {"x": "../a.safetensors"}}')
    assert "'../a.safetensors' is outside the folder" in (find_missing_weights(tmp_path) or "")
    index.write_text("[]")
    assert "cannot be read" in (find_missing_weights(tmp_path) or "")


def test_pipes_in_a_model_folder_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").touch()
    (tmp_path / "tokenizer").mkdir()
    assert [path.name for path in list_weight_files(tmp_path)] == ["model-1.safetensors"]
    os.mkfifo(tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"model-2.safetensors is not a regular file\. Delete it"):
        list_weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-1.safetensors"}}')
    assert "is not a regular file" in (find_missing_weights(tmp_path) or "")
