import json
import math
import os
import pickle
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from embodyrl.checkpoint.tensors import get_rng_state, load_state, load_tensors, save_state, save_tensors, set_rng_state
from embodyrl.errors import CheckpointError


def build(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    groups = [{"params": model[0].parameters(), "lr": 3e-3}, {"params": model[2].parameters(), "name": "head"}]
    if kind == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=0.1 / 3, betas=(0.9, 0.999), amsgrad=True)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.1 / 3, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)


def train(model, optimizer, scheduler, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        data = torch.randn(16, 4)
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_restored_training_is_bit_identical(kind: str, tmp_path: Path):
    model, optimizer, scheduler = build(kind)
    train(model, optimizer, scheduler, 3)
    save_tensors(tmp_path / "model.safetensors", model.state_dict())
    save_state(tmp_path, "optimizer", optimizer.state_dict())
    save_state(tmp_path, "scheduler", scheduler.state_dict())
    save_state(tmp_path, "rng", get_rng_state())
    golden = train(model, optimizer, scheduler, 4)

    resumed_model, resumed_optimizer, resumed_scheduler = build(kind)
    torch.manual_seed(99)
    resumed_model.load_state_dict(load_tensors(tmp_path / "model.safetensors"))
    resumed_optimizer.load_state_dict(load_state(tmp_path, "optimizer"))
    resumed_scheduler.load_state_dict(load_state(tmp_path, "scheduler"))
    set_rng_state(load_state(tmp_path, "rng"))
    assert train(resumed_model, resumed_optimizer, resumed_scheduler, 4) == golden
    for ours, theirs in zip(resumed_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_restored_random_generators_continue_their_sequence(tmp_path: Path):
    generator = np.random.default_rng(5)
    generator.normal(size=3)
    random.gauss(0, 1)
    save_state(tmp_path, "rng", get_rng_state() | {"own": generator.bit_generator.state})
    golden = (torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.gauss(0, 1), generator.normal())
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    state = load_state(tmp_path, "rng")
    set_rng_state(state)
    other = np.random.default_rng(0)
    other.bit_generator.state = state["own"]
    again = (torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.gauss(0, 1), other.normal())
    assert again == golden


def test_state_trees_round_trip_exactly(tmp_path: Path):
    base = torch.arange(12, dtype=torch.float32)
    tree = {
        "none": None,
        "flag": True,
        "big": 2**100,
        "tiny": 5e-324,
        "third": 1 / 3,
        "inf": [math.inf, -math.inf],
        "text": "ünïcode",
        "pair": (1, [2, (3,)]),
        "empty": {},
        7: {"nested": {0: "zero", "0": "text zero"}},
        "bf16": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "view": base[2:5],
        "strided": base.view(3, 4).t(),
        "same": base,
        "array": np.array(5, dtype=np.uint32),
        "matrix": np.eye(2)[::-1],
        "tagged": {"$tensor": "a string"},
    }
    save_state(tmp_path, "state", tree)
    back = load_state(tmp_path, "state")
    assert list(back) == list(tree)
    for name, value in tree.items():
        if isinstance(value, torch.Tensor):
            assert back[name].dtype == value.dtype
            assert back[name].shape == value.shape
            assert back[name].float().numpy().tobytes() == value.float().contiguous().numpy().tobytes()
        elif isinstance(value, np.ndarray):
            assert back[name].dtype == value.dtype
            np.testing.assert_array_equal(back[name], value)
            assert back[name].shape == value.shape
        else:
            assert back[name] == value
            assert type(back[name]) is type(value)


def test_tensor_keys_with_slashes_do_not_collide(tmp_path: Path):
    save_state(tmp_path, "state", {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}})
    back = load_state(tmp_path, "state")
    assert (back["a/b"].item(), back["a"]["b"].item()) == (0.0, 1.0)


def test_state_without_tensors_round_trips(tmp_path: Path):
    save_state(tmp_path, "loop", {"step": 3, "cursor": [1, 2]})
    assert load_state(tmp_path, "loop") == {"step": 3, "cursor": [1, 2]}


def test_objects_that_would_need_pickle_are_rejected(tmp_path: Path):
    with pytest.raises(TypeError, match=r"state '/a/0' of type Path|state '/a/0' of type PosixPath"):
        save_state(tmp_path, "x", {"a": [tmp_path]})
    with pytest.raises(TypeError, match="of type dict"):
        save_state(tmp_path, "x", {("tuple", "key"): 1})


def test_error_names_truncated_or_missing_files(tmp_path: Path):
    save_state(tmp_path, "optimizer", {"m": torch.ones(100), "n": torch.ones(3)})
    file = tmp_path / "optimizer.safetensors"
    os.truncate(file, 200)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is not a readable"):
        load_state(tmp_path, "optimizer")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing"):
        load_state(tmp_path, "optimizer")
    with pytest.raises(CheckpointError, match=r"rng\.json is missing"):
        load_state(tmp_path, "rng")


def test_mismatched_json_and_tensors_are_an_error(tmp_path: Path):
    save_state(tmp_path, "optimizer", {"m": torch.ones(2)})
    save_tensors(tmp_path / "optimizer.safetensors", {"other": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"optimizer\.json is damaged or does not fit"):
        load_state(tmp_path, "optimizer")


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return (Path.touch, (self.canary,))


@pytest.mark.parametrize("place", ["json", "safetensors"])
def test_pickle_file_is_rejected_and_not_executed(place: str, tmp_path: Path):
    canary = tmp_path / "canary"
    bomb = pickle.dumps(Bomb(canary))
    pickle.loads(bomb)
    assert canary.exists()
    canary.unlink()
    save_state(tmp_path, "optimizer", {"m": torch.ones(2)})
    (tmp_path / f"optimizer.{place}").write_bytes(bomb)
    with pytest.raises(CheckpointError, match=rf"optimizer\.{place}"):
        load_state(tmp_path, "optimizer")
    assert not canary.exists()


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<Q", 10 * 2**30) + b"{}",
        struct.pack("<Q", 2**64 - 1),
        b"",
        struct.pack("<Q", 70)
        + json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 8]}}).encode().ljust(70)
        + bytes(8),
    ],
    ids=["10 GiB header", "overflowing header", "empty", "shape beyond the data"],
)
def test_malicious_safetensors_headers_are_rejected(raw: bytes, tmp_path: Path):
    (tmp_path / "w.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"w\.safetensors is not a readable"):
        load_tensors(tmp_path / "w.safetensors")


def test_shared_tensors_are_written_separately(tmp_path: Path):
    weight = torch.arange(4.0)
    save_tensors(tmp_path / "tied.safetensors", {"a": weight, "b": weight, "c": weight.view(2, 2)})
    back = load_tensors(tmp_path / "tied.safetensors")
    assert torch.equal(back["a"], back["b"])
    assert back["c"].shape == (2, 2)
    assert back["a"].data_ptr() != back["b"].data_ptr()


@pytest.mark.parametrize(
    "content", ["null", "[]", "7", "[" * 200_000 + "]" * 200_000], ids=["null", "list", "7", "deep"]
)
def test_state_that_is_not_an_object_is_a_checkpoint_error(tmp_path, content):
    save_state(tmp_path, "rng", {"a": 1})
    (tmp_path / "rng.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"rng.json is damaged"):
        load_state(tmp_path, "rng")
