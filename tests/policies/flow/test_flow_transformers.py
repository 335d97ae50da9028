"""pi0 against the transformers model with the same weights."""

import pytest
import torch
from golden_flow import build, inputs_of, loss_of, model_of, recorded, sample, spec_of
from safetensors.torch import load_file
from transformers import PI0Config, PI0ForConditionalGeneration

from embodyrl.policies.flow.layouts import EMBEDDING, LEROBOT, OPENPI, TRANSFORMERS, TRANSFORMERS_OLD
from embodyrl.policies.flow.specs import read_spec
from embodyrl.policies.flow.vla.build import load_weights, save_weights

STEPS = 10


def unused_token(data, vocab):
    return next(i for i in range(vocab) if not (data["tokens"] == i).any())


def config_of(spec, image_token):
    def gemma(layers):
        return {
            "model_type": "gemma",
            "hidden_size": layers.width,
            "num_hidden_layers": layers.depth,
            "intermediate_size": layers.mlp,
            "num_attention_heads": layers.heads,
            "num_key_value_heads": layers.kv_heads,
            "head_dim": layers.head_dim,
        }

    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": spec.vision.width,
        "intermediate_size": spec.vision.mlp,
        "num_hidden_layers": spec.vision.depth,
        "num_attention_heads": spec.vision.heads,
        "patch_size": spec.vision.patch_size,
        "image_size": spec.vision.image_size,
        "projection_dim": spec.language.width,
        "vision_use_head": False,
    }
    vlm = {
        "model_type": "paligemma",
        "text_config": gemma(spec.language) | {"vocab_size": spec.vocab},
        "vision_config": vision,
        "projection_dim": spec.language.width,
        "image_token_id": image_token,
    }
    return PI0Config(vlm_config=vlm, dit_config=gemma(spec.expert), chunk_size=spec.horizon)


def theirs(inputs, image_token, per_image):
    """Run the transformers model; its prompt has a placeholder per image token, and padding is on the right."""
    rows = []
    for cameras, tokens, mask in zip(inputs.image_mask, inputs.tokens, inputs.token_mask, strict=True):
        images = torch.full((int(cameras.sum()) * per_image,), image_token)
        rows.append(torch.cat([images, tokens[mask]]))
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([[len(row)] for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(ids.shape[1]) < lengths).long(),
        "pixel_values": inputs.images,
        "pixel_attention_mask": inputs.image_mask,
        "state": inputs.state,
    }


@pytest.fixture(scope="module")
def setup():
    data, spec = recorded("pi0"), spec_of("pi0")
    image_token = unused_token(data, spec.vocab)
    inputs = inputs_of(data)
    return data, inputs, config_of(spec, image_token), theirs(inputs, image_token, spec.image_tokens)


def load_theirs(folder, config, layout):
    """Load the transformers model from a file written by embodyrl."""
    save_weights(model_of("pi0").state_dict(), folder, layout)
    config.save_pretrained(folder)
    model, info = PI0ForConditionalGeneration.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert [found for found in info.values() if found] == []
    return model.eval()


@pytest.fixture(scope="module")
def loaded(setup, tmp_path_factory):
    return load_theirs(tmp_path_factory.mktemp("theirs"), setup[2], TRANSFORMERS)


def test_weight_names_match_transformers(loaded):
    ours = {TRANSFORMERS.to_external(key) for key in model_of("pi0").state_dict()} | {
        key for key, _ in TRANSFORMERS.unused
    }
    assert ours == set(loaded.state_dict())
    assert TRANSFORMERS.to_external(EMBEDDING) in ours


@torch.no_grad()
def test_velocities_and_actions_match_transformers(setup, loaded):
    data, inputs, _, batch = setup
    ours = model_of("pi0")
    prefix = ours.prefix(inputs)
    velocity = ours.denoise(ours.memory(prefix), data["noise"], data["time"]).velocity
    found = loaded(**batch, noise=data["noise"], timestep=data["time"]).logits
    torch.testing.assert_close(velocity, found, atol=1e-4, rtol=0.0)
    actions = loaded.sample_actions(**batch, noise=data["noise"].clone(), num_steps=STEPS)
    torch.testing.assert_close(sample(ours, prefix, data["noise"], STEPS), actions, atol=3e-4, rtol=0.0)


def test_gradients_match_transformers(setup, loaded):
    data, inputs, _, batch = setup
    ours, actions = model_of("pi0"), torch.randn(data["noise"].shape, generator=torch.Generator().manual_seed(1))
    loss = loss_of(ours, ours.prefix(inputs), actions, data["noise"], data["time"]).mean()
    loss.backward()
    loaded.zero_grad()
    found = loaded(**batch, noise=data["noise"], timestep=data["time"], actions=actions).loss
    found.backward()
    torch.testing.assert_close(loss.detach(), found.detach(), atol=0.0, rtol=1e-4)
    compared = 0
    for key, parameter in ours.named_parameters():
        expected = loaded.get_parameter(TRANSFORMERS.to_external(key)).grad
        if parameter.grad is None:
            assert expected is None or not expected.any()
            continue
        # The gradient of a bias of keys is zero: softmax does not see it.
        atol = 1e-3 * float(expected.abs().max()) + 1e-7
        torch.testing.assert_close(parameter.grad, expected, atol=atol, rtol=1e-3)
        compared += 1
    assert compared > 100


@pytest.mark.parametrize("layout", [OPENPI, LEROBOT, TRANSFORMERS, TRANSFORMERS_OLD], ids=lambda layout: layout.name)
def test_checkpoints_round_trip_through_transformers(layout, setup, tmp_path):
    load_theirs(tmp_path / "ours", setup[2], layout).save_pretrained(tmp_path / "theirs")
    check_saved(tmp_path / "theirs", model_of("pi0").state_dict())


def test_new_transformers_checkpoint_is_read(setup, tmp_path):
    theirs = PI0ForConditionalGeneration(setup[2])
    theirs.save_pretrained(tmp_path / "theirs")
    state = theirs.state_dict()
    dead = {key for key, _ in TRANSFORMERS.unused}
    check_saved(tmp_path / "theirs", {TRANSFORMERS.to_local(key): state[key] for key in state if key not in dead})


def check_saved(folder, weights):
    """Check that a folder of `save_pretrained` is read, and written again key by key."""
    spec = read_spec(folder)
    assert spec == spec_of("pi0")
    model = build(spec)
    source = load_weights(model.state_dict(), folder)
    assert {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, weights[key])} == set()
    save_weights(model.state_dict(), folder / "again", source)
    before, after = (load_file(place / "model.safetensors") for place in (folder, folder / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
