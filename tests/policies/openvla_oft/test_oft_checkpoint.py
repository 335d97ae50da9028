import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from embodyrl.config.shared import Precision
from embodyrl.errors import CheckpointError
from embodyrl.policies.openvla_oft import checkpoint as checkpoint_module
from embodyrl.text.model_folder import list_weight_files

SHARD = "model-00002-of-00003.safetensors"


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def original(folder):
    return {k: v for path in sorted(folder.glob("model-*.safetensors")) for k, v in load_file(path).items()}


def test_bf16_save_has_every_tensor_of_the_original(checkpoint, make_policy, tmp_path):
    make_policy(checkpoint, precision=Precision.bf16, trainable=False).save(tmp_path / "saved")
    saved, want = load_file(tmp_path / "saved" / "model.safetensors"), original(checkpoint)
    assert saved.keys() == want.keys()
    assert len(saved) == 177
    for key, tensor in want.items():
        assert saved[key].dtype == tensor.dtype == torch.bfloat16
        assert torch.equal(saved[key], tensor), key


def test_resaved_checkpoint_is_byte_identical(checkpoint, make_policy, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "SHARD_BYTES", 1_500_000)
    first = make_policy(checkpoint, value_dim=8)
    first.save(tmp_path / "a")
    second = make_policy(tmp_path / "a", value_dim=8, seed=1)
    second.save(tmp_path / "b")
    a, b = files_of(tmp_path / "a"), files_of(tmp_path / "b")
    assert a == b
    assert len([name for name in a if name.startswith("model-")]) > 1
    index = json.loads(a["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == 4 * sum(
        p.numel() for name, p in first.module.named_parameters() if not name.startswith("value_head.")
    )
    for name in ("tokenizer.json", "dataset_statistics.json", "preprocessor_config.json", "config.json"):
        assert a[name] == (checkpoint / name).read_bytes()


def test_saved_tiny_preset_does_not_request_random_weights(make_policy, tmp_path):
    policy = make_policy("assets/openvla_oft_tiny", seed=3)
    policy.save(tmp_path / "saved")
    assert "embodyrl_init" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = make_policy(tmp_path / "saved", seed=4)
    for (name, a), (_, b) in zip(policy.module.named_parameters(), again.module.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_load_weights_updates_tensors_in_place(checkpoint, make_policy, tmp_path):
    policy = make_policy(checkpoint, value_dim=1)
    policy.save(tmp_path / "saved")
    before = {name: p.detach().clone() for name, p in policy.module.named_parameters()}
    pointers = {name: p.data_ptr() for name, p in policy.module.named_parameters()}
    with torch.no_grad():
        for p in policy.module.parameters():
            p.add_(1.0)
    policy.load_weights(tmp_path / "saved")
    for name, p in policy.module.named_parameters():
        assert torch.equal(p, before[name]), name
        assert p.data_ptr() == pointers[name]


def test_value_head_is_optional(checkpoint, make_policy, tmp_path):
    make_policy(checkpoint, value_dim=1, seed=7).save(tmp_path / "with_head")
    saved = load_file(tmp_path / "with_head" / "value_head.safetensors")
    assert list(saved) == [f"value_head.mlp.{n}" for n in ("0.bias", "0.weight", "2.bias", "2.weight", "4.weight")]
    loaded = make_policy(tmp_path / "with_head", value_dim=1, seed=8).module.state_dict()
    assert all(torch.equal(loaded[k], v) for k, v in saved.items())
    assert make_policy(tmp_path / "with_head", value_dim=0).module.value_head is None
    fresh = make_policy(checkpoint, value_dim=1, seed=7).module.state_dict()
    assert all(torch.equal(fresh[k], v) for k, v in saved.items())
    with pytest.raises(CheckpointError, match=r"value_head\.mlp\.4\.weight.*\[1, 128\].*\[8, 128\]"):
        make_policy(tmp_path / "with_head", value_dim=8)


def test_stored_rope_frequencies_are_ignored(checkpoint, make_policy):
    key = "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"
    want = make_policy(checkpoint).module.state_dict()
    rewrite(checkpoint / SHARD, lambda t: t.update({key: torch.ones(4)}))
    got = make_policy(checkpoint).module.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[k], v) for k, v in want.items())


def test_a_single_file_without_index_loads(checkpoint, make_policy):
    want = make_policy(checkpoint).module.state_dict()
    save_file(original(checkpoint), checkpoint / "model.safetensors", metadata={"format": "pt"})
    for path in [*checkpoint.glob("model-*"), checkpoint / "model.safetensors.index.json"]:
        path.unlink()
    got = make_policy(checkpoint).module.state_dict()
    assert all(torch.equal(got[k], v) for k, v in want.items())


def _drop_key(folder):
    rewrite(folder / SHARD, lambda t: t.pop(sorted(t)[0]))
    return r"lacks 1 of 177 weights: '"


def _add_key(folder):
    rewrite(folder / SHARD, lambda t: t.update({"language_model.extra": torch.ones(1)}))
    return rf"has 1 unexpected weights: 'language_model\.extra' in {SHARD}"


def _reshape(folder):
    def change(tensors):
        key = next(k for k in tensors if k.endswith("norm.weight") or "layernorm" in k)
        tensors[key] = torch.ones(5)

    rewrite(folder / SHARD, change)
    return rf"1 weights differ in shape .*norm.*' in {SHARD} \[5\] instead of \[16\]"


def _truncate(folder):
    path = folder / SHARD
    path.write_bytes(path.read_bytes()[:-1000])
    return rf"{SHARD} is missing, truncated"


def _cut_header(folder):
    (folder / SHARD).write_bytes(struct.pack("<Q", 10**9) + b"{")
    return rf"{SHARD} is missing, truncated"


def _lose_shard(folder):
    (folder / SHARD).unlink()
    return rf"lacks 1 of 3 weight files, such as {SHARD}"


def _break_index(folder):
    (folder / "model.safetensors.index.json").write_text("[]")
    return r"index\.json cannot be read"


@pytest.mark.parametrize("damage", [_drop_key, _add_key, _reshape, _truncate, _cut_header, _lose_shard, _break_index])
def test_damaged_checkpoints_are_rejected_without_changes(checkpoint, make_policy, tmp_path, damage):
    policy = make_policy(checkpoint)
    before = {name: p.detach().clone() for name, p in policy.module.named_parameters()}
    with torch.no_grad():
        for p in policy.module.parameters():
            p.mul_(2.0)
    message = damage(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        policy.load_weights(checkpoint)
    assert all(torch.equal(p, 2 * before[name]) for name, p in policy.module.named_parameters())


def test_index_cannot_name_files_outside_its_folder(checkpoint):
    index = checkpoint / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][next(iter(content["weight_map"]))] = "../model.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"'../model.safetensors' is outside the folder"):
        list_weight_files(checkpoint)


def test_a_folder_without_weights_is_rejected(checkpoint, make_policy, tmp_path):
    policy = make_policy(checkpoint)
    with pytest.raises(CheckpointError, match=r"contains no model\*\.safetensors"):
        policy.load_weights(tmp_path)


def test_config_must_match_the_weights(checkpoint, make_policy, edit_json):
    text = json.loads((checkpoint / "config.json").read_text())["text_config"]
    edit_json(checkpoint / "config.json", text_config=text | {"intermediate_size": 44})
    with pytest.raises(CheckpointError, match=r"differ in shape .*config\.json does not belong"):
        make_policy(checkpoint)


def test_trainable_weights_are_fp32_and_frozen_weights_are_bf16(checkpoint, make_policy):
    for trainable, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        policy = make_policy(checkpoint, precision=Precision.bf16, trainable=trainable, value_dim=1)
        dtypes = {name: p.dtype for name, p in policy.module.named_parameters()}
        assert {d for name, d in dtypes.items() if not name.startswith("value_head")} == {dtype}
        assert {d for name, d in dtypes.items() if name.startswith("value_head")} == {torch.float32}
        assert np.all([p.requires_grad for p in policy.module.value_head.parameters()]) == trainable
