"""Weight names of public checkpoints round-trip, and mismatched weights are rejected by name."""

import pytest
import torch
from golden_flow import GOLDEN, NAMES, build, model_of, spec_of, stored
from safetensors.torch import load_file, save_file

from embodyrl.errors import CheckpointError
from embodyrl.policies.flow.layouts import (
    EMBEDDING,
    LAYOUTS,
    LEROBOT,
    OPENPI,
    SMOLVLA_LEROBOT,
    TRANSFORMERS,
    StorageFormat,
    build_storage_format,
    to_external_names,
    to_local_names,
)
from embodyrl.policies.flow.vla.build import load_weights, save_weights

OUTPUT = OPENPI.tied
OWN_EMBEDDING = OPENPI.to_external(EMBEDDING)
ANY = "paligemma_with_expert.gemma_expert.model.layers.2.mlp.up_proj.weight"


def same(left, right):
    assert left.keys() == right.keys()
    assert [key for key in left if not torch.equal(left[key], right[key])] == []


def write(folder, tensors):
    folder.mkdir()
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def layouts_of(name):
    if name == "smolvla":
        return [SMOLVLA_LEROBOT]
    return [layout for layout in LAYOUTS if layout is not SMOLVLA_LEROBOT]


CASES = [(name, layout) for name in NAMES for layout in layouts_of(name)]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_weight_layouts_round_trip(name, layout, tmp_path):
    model = model_of(name)
    save_weights(model.state_dict(), tmp_path / "saved", layout)
    written = load_file(tmp_path / "saved" / "model.safetensors")
    fresh = build(spec_of(name))
    source = load_weights(fresh.state_dict(), tmp_path / "saved")
    assert source.layout is layout
    same(fresh.state_dict(), model.state_dict())
    save_weights(fresh.state_dict(), tmp_path / "again", source)
    same(load_file(tmp_path / "again" / "model.safetensors"), written)


@pytest.mark.parametrize("name", NAMES)
def test_original_files_round_trip_key_by_key(name, tmp_path):
    original = stored(name)
    model = build(spec_of(name))
    source = load_weights(model.state_dict(), write(tmp_path / "in", original))
    save_weights(model.state_dict(), tmp_path / "out", source)
    same(load_file(tmp_path / "out" / "model.safetensors"), original)


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_weight_names_match_the_originals(name):
    """The recorded file has openpi's names; lerobot adds the prefix `model.`."""
    original = stored(name)
    weights, source = to_local_names(original, GOLDEN)
    assert source == StorageFormat(layout=OPENPI, embedding_names=(OWN_EMBEDDING,))
    lerobot = to_external_names(weights, StorageFormat(layout=LEROBOT, embedding_names=(f"model.{OWN_EMBEDDING}",)))
    same(lerobot, {f"model.{key}": tensor for key, tensor in original.items()})


@pytest.mark.parametrize("names", [(OUTPUT,), (OWN_EMBEDDING, OUTPUT)], ids=["only the output", "both"])
def test_embedding_can_be_stored_as_the_output_matrix(names, tmp_path):
    original = stored("pi0")
    embedding = original.pop(OWN_EMBEDDING)
    original |= dict.fromkeys(names, embedding)
    model = build(spec_of("pi0"))
    source = load_weights(model.state_dict(), write(tmp_path / "in", original))
    assert torch.equal(model.language.embed_tokens.weight, embedding)
    save_weights(model.state_dict(), tmp_path / "out", source)
    same(load_file(tmp_path / "out" / "model.safetensors"), original)


def test_untied_output_matrix_is_rejected(tmp_path):
    original = stored("pi0")
    untied = original[OWN_EMBEDDING].clone()
    untied[3, 4] += 1e-3
    with pytest.raises(CheckpointError, match=rf"'{OUTPUT}' and '{OWN_EMBEDDING}' are tied weights"):
        load_weights(build(spec_of("pi0")).state_dict(), write(tmp_path / "in", original | {OUTPUT: untied}))


def test_unused_weights_are_kept(tmp_path):
    beside = {
        OPENPI.unused[0][0]: torch.randn(400, 64),
        "normalize_inputs.buffer_observation_state.mean": torch.randn(8),
        "value_head.mlp.0.weight": torch.randn(4, 64),
        "noise_head.mlp_logvar.0.bias": torch.randn(3),
    }
    model = build(spec_of("pi0"))
    source = load_weights(model.state_dict(), write(tmp_path / "in", stored("pi0") | beside))
    same(dict(source.extra_tensors), beside)
    save_weights(model.state_dict(), tmp_path / "out", source)
    same(load_file(tmp_path / "out" / "model.safetensors"), stored("pi0") | beside)


def test_rl_heads_are_loaded_if_the_model_has_them(tmp_path):
    """RLinf's layout; without heads in the checkpoint the model keeps its own."""
    model, weight = model_of("pi0"), torch.randn(4, 64)
    model.value_head = torch.nn.Linear(64, 4, bias=False)
    load_weights(model.state_dict(), write(tmp_path / "with", stored("pi0") | {"value_head.weight": weight}))
    assert torch.equal(model.value_head.weight, weight)
    load_weights(model.state_dict(), write(tmp_path / "without", stored("pi0")))
    assert torch.equal(model.value_head.weight, weight)
    with pytest.raises(CheckpointError, match=r"1 weights differ in shape .*'value_head.weight' \[4, 63\]"):
        load_weights(
            model.state_dict(), write(tmp_path / "narrow", stored("pi0") | {"value_head.weight": weight[:, :63]})
        )


def test_value_head_of_another_architecture_is_ignored(tmp_path):
    """RLinf's head is `value_head.mlp.{0,2,4}`: the value head stays random, and the policy is loaded."""
    model, weight = model_of("pi0"), torch.randn(4, 64)
    model.value_head = torch.nn.Sequential(torch.nn.Linear(64, 4))
    own = {key: tensor.clone() for key, tensor in model.value_head.state_dict().items()}
    theirs = {"value_head.mlp.0.weight": weight, "value_head.mlp.0.bias": weight[:, 0].clone()}
    source = load_weights(model.state_dict(), write(tmp_path / "in", stored("pi0") | theirs))
    same(dict(source.extra_tensors), theirs)
    same(model.value_head.state_dict(), own)
    with pytest.raises(CheckpointError, match=r"lacks 1 of .*'value_head.0.bias'"):
        load_weights(model.state_dict(), write(tmp_path / "half", stored("pi0") | {"value_head.0.weight": weight}))


def refused(tensors, folder, match, name="pi0"):
    """Expect an error and unchanged weights."""
    model = build(spec_of(name))
    model.initialize(0)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=match):
        load_weights(model.state_dict(), write(folder, tensors))
    same(model.state_dict(), before)


def test_error_names_missing_weights(tmp_path):
    tensors = stored("pi0")
    del tensors[ANY], tensors["action_in_proj.bias"]
    refused(tensors, tmp_path / "in", rf"lacks 2 of \d+ weights: 'action_in_proj.bias', '{ANY}'")


def test_error_names_a_missing_embedding(tmp_path):
    tensors = stored("pi0")
    del tensors[OWN_EMBEDDING]
    refused(tensors, tmp_path / "in", rf"lacks 1 of \d+ weights: '{OWN_EMBEDDING}'")


def test_each_missing_weight_is_rejected():
    model = model_of("smolvla")
    for key in stored("smolvla"):
        tensors = stored("smolvla")
        del tensors[key]
        weights, _ = to_local_names(tensors, GOLDEN)
        gone = set(model.state_dict()) - set(weights)
        assert gone == ({SMOLVLA_LEROBOT.to_local(key)} if "lm_head" not in key else set())


@pytest.mark.parametrize(
    "key", ["paligemma_with_expert.gemma_expert.model.layers.4.mlp.up_proj.weight", "time_mlp_in.bias"]
)
def test_error_names_unexpected_weights(key, tmp_path):
    refused(stored("pi0") | {key: torch.zeros(2)}, tmp_path / "in", rf"has 1 unexpected weights: '{key}'")


def test_weight_name_of_another_layout_is_rejected(tmp_path):
    stray = "vision.post_layernorm.bias"
    refused(stored("pi0") | {stray: torch.zeros(32)}, tmp_path / "in", rf"'{stray}' does not match the layout")


def test_error_names_weights_of_wrong_shape(tmp_path):
    refused(
        stored("pi0") | {ANY: torch.zeros(128, 63)}, tmp_path / "in", rf"'{ANY}' \[128, 63\] instead of \[128, 64\]"
    )


def test_truncated_weight_file_is_rejected(tmp_path):
    folder = write(tmp_path / "in", stored("pi0"))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="truncated"):
        load_weights(build(spec_of("pi0")).state_dict(), folder)


def test_weights_of_another_flow_model_are_rejected(tmp_path):
    refused(stored("pi05"), tmp_path / "pi05", r"unexpected weights: .*layers.0.input_layernorm.dense.bias")
    refused(stored("smolvla"), tmp_path / "smolvla", "unexpected weights|lacks")
    refused({"a.weight": torch.zeros(1)}, tmp_path / "other", r"\(first name: 'a.weight'\) match no known layout")


def test_a_folder_without_weights_is_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="contains no model"):
        load_weights(build(spec_of("pi0")).state_dict(), tmp_path)


def test_sharded_weights_are_loaded(tmp_path):
    tensors = stored("pi0")
    keys = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": keys[:40], "model-00002-of-00002.safetensors": keys[40:]}
    for file, names in parts.items():
        save_file({key: tensors[key] for key in names}, tmp_path / file)
    model = build(spec_of("pi0"))
    load_weights(model.state_dict(), tmp_path)
    same(model.state_dict(), model_of("pi0").state_dict())
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks 40 of"):
        load_weights(model.state_dict(), tmp_path)


def test_new_model_has_all_weights_of_each_layout():
    """One copy of the embedding, and zeros for the unused output matrix."""
    weights = model_of("pi0").state_dict()
    for layout in (OPENPI, LEROBOT, TRANSFORMERS):
        source = build_storage_format(layout, weights)
        assert source.embedding_names == (layout.tied or layout.to_external(EMBEDDING),)
        assert {key: tuple(tensor.shape) for key, tensor in source.extra_tensors.items()} == {
            layout.unused[0][0]: (400, 64)
        }


def test_bfloat16_files_load_into_float32_models(tmp_path):
    tensors = {key: tensor.bfloat16() for key, tensor in stored("pi0").items()}
    model = build(spec_of("pi0"))
    load_weights(model.state_dict(), write(tmp_path / "in", tensors))
    assert model.state_proj.weight.dtype == torch.float32
    assert torch.equal(model.state_proj.weight, tensors["state_proj.weight"].float())
