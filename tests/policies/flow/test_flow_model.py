"""Flow models beyond the recorded tensors: batches, masks, features, gradients, precision and initialization."""

from dataclasses import replace

import pytest
import torch
from golden_flow import NAMES, backbone_of, build, inputs_of, loss_of, model_of, recorded, sample, spec_of

from embodyrl.policies.flow.model import embed_time
from embodyrl.policies.flow.specs import PI0, PI05, SMOLVLA


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def model(name):
    return model_of(name)


@pytest.fixture
def data(name):
    return recorded(name)


def close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance * float(expected.abs().max()), rtol=0.0)


@torch.no_grad()
def test_model_rows_are_batch_independent(model, data):
    inputs = inputs_of(data)
    prefix = model.prefix(inputs)
    both = sample(model, prefix, data["noise"], 3)
    for row in range(2):
        index = torch.tensor([row])
        alone = type(inputs)(**{key: getattr(inputs, key)[index] for key in inputs.__slots__})
        close(sample(model, model.prefix(alone), data["noise"][index], 3), both[index])


@torch.no_grad()
def test_shared_timestep_matches_per_row_timesteps(model, data):
    memory = model.memory(model.prefix(inputs_of(data)))
    one = model.denoise(memory, data["noise"], torch.tensor([0.7]))
    each = model.denoise(memory, data["noise"], torch.full((2,), 0.7))
    close(one.velocity, each.velocity)
    close(one.hidden, each.hidden)
    assert one.hidden.shape == (2, model.spec.horizon, model.spec.expert.width)


@torch.no_grad()
def test_masked_inputs_have_no_effect(model, data):
    inputs = inputs_of(data)
    images, tokens = inputs.images.clone(), inputs.tokens.clone()
    images[~inputs.image_mask] = 1.0
    tokens[~inputs.token_mask] = 7
    changed = replace(inputs, images=images, tokens=tokens)
    assert not torch.equal(images, inputs.images)
    assert not torch.equal(tokens, inputs.tokens)
    first, second = (sample(model, model.prefix(x), data["noise"], 2) for x in (inputs, changed))
    assert torch.equal(first, second)


@torch.no_grad()
def test_right_padding_has_no_effect(model, data):
    inputs = inputs_of(data)
    wide = replace(
        inputs,
        tokens=torch.nn.functional.pad(inputs.tokens, (0, 5)),
        token_mask=torch.nn.functional.pad(inputs.token_mask, (0, 5)),
    )
    close(sample(model, model.prefix(wide), data["noise"], 2), sample(model, model.prefix(inputs), data["noise"], 2))


@torch.no_grad()
def test_state_input_is_used_except_by_pi05(model, data, name):
    inputs = inputs_of(data)
    moved = replace(inputs, state=inputs.state + 0.5)
    first, second = (sample(model, model.prefix(x), data["noise"], 1) for x in (inputs, moved))
    assert torch.equal(first, second) is (name == "pi05")


@torch.no_grad()
def test_action_attention_is_causal_only_in_smolvla(model, data, name):
    memory, changed = model.memory(model.prefix(inputs_of(data))), data["noise"].clone()
    changed[:, -1] += 1.0
    first, second = (model.denoise(memory, x, torch.ones(1)).velocity[:, :-1] for x in (data["noise"], changed))
    assert torch.allclose(first, second, atol=1e-5) is (name == "smolvla")


@torch.no_grad()
def test_backbone_output_option_does_not_change_keys_and_values(model, data):
    inputs = inputs_of(data)
    plain, full = model.prefix(inputs), model.prefix(inputs, output=True)
    assert plain.hidden is None
    assert full.hidden.shape == (*full.valid.shape, model.spec.language.width)
    for pair, expected in zip(full.layers, plain.layers, strict=True):
        for found, want in zip(pair, expected, strict=True):
            real = full.valid[:, None, :, None].expand_as(found)
            close(found[real], want[real])
    assert full.hidden.isfinite().all()


@torch.no_grad()
def test_fully_masked_row_averages_all_values(model, data):
    """A fully masked query has equal weights: RLinf's value of pi0.5 also averages padded rows."""
    layer, prefix = model.language.layers[0], model.prefix(inputs_of(data), output=True)
    row = int((~prefix.valid[1]).nonzero()[0])
    embeddings, _ = model.embed_prefix(inputs_of(data))
    attention, heads = layer.self_attn, model.spec.language.heads
    values = prefix.layers[0][1][1].mean(dim=1).repeat_interleave(heads // model.spec.language.kv_heads, dim=0)
    x = embeddings[1, row] + attention.o_proj(values.flatten())
    expected = x + layer.mlp(layer.post_attention_layernorm(x[None, None])[0])[0, 0]
    seen = []
    handle = layer.register_forward_hook(lambda _module, _args, result: seen.append(result[0]))
    model.prefix(inputs_of(data), output=True)
    handle.remove()
    close(seen[0][1, row], expected, 1e-4)


def saved_bytes(run):
    """Return the bytes that autograd stores for a computation, and its result."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return sum(sizes.values()), result


def test_a_frozen_backbone_keeps_no_activations(model, data, name):
    """In SmolVLA the state's projection still has a gradient."""
    for parameter in backbone_of(model):
        parameter.requires_grad_(False)
    kept, prefix = saved_bytes(lambda: model.prefix(inputs_of(data)))
    assert kept == 0
    loss_of(model, prefix, torch.zeros_like(data["noise"]), data["noise"], data["time"]).mean().backward()
    trained = {key for key, parameter in model.named_parameters() if parameter.grad is not None}
    assert {"action_in_proj.weight", "action_out_proj.bias", "expert.layers.1.mlp.up_proj.weight"} <= trained
    assert ("state_proj.weight" in trained) is (name != "pi05")
    assert not any(key.startswith(("vision", "projector", "language")) for key in trained)


def test_precomputed_prefix_gives_the_same_gradients(model, data):
    """The prefix of a frozen backbone can be reused in any number of updates."""
    for parameter in backbone_of(model):
        parameter.requires_grad_(False)
    with torch.no_grad():
        stored = model.prefix(inputs_of(data))
    for prefix in (stored, model.prefix(inputs_of(data))):
        model.zero_grad()
        loss_of(model, prefix, torch.zeros_like(data["noise"]), data["noise"], data["time"]).mean().backward()
        found = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        if prefix is stored:
            first = found
    assert first.keys() == found.keys()
    assert all(torch.equal(first[key], found[key]) for key in first)


def test_gradient_checkpointing_gives_the_same_gradients(model, data):
    def gradients():
        model.zero_grad()
        loss = loss_of(
            model, model.prefix(inputs_of(data)), torch.zeros_like(data["noise"]), data["noise"], data["time"]
        )
        loss.mean().backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    kept, first = saved_bytes(gradients)
    model.recompute_activations()
    less, second = saved_bytes(gradients)
    assert less < kept
    assert first.keys() == second.keys()
    for key, expected in first.items():
        torch.testing.assert_close(second[key], expected, atol=1e-6, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("cast", [True, False], ids=["weights", "autocast"])
def test_bfloat16_outputs_are_close_to_float32(model, data, cast):
    expected = sample(model, model.prefix(inputs_of(data)), data["noise"], 4)
    if cast:
        model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
        prefix = model.prefix(inputs_of(data), output=True)
        actions = sample(model, prefix, data["noise"], 4)
    assert actions.dtype == torch.float32
    assert prefix.hidden.isfinite().all()
    error = (actions - expected).abs()
    assert error.mean() < 0.03 * expected.abs().mean()
    assert error.max() > 0


def test_layers_are_called_only_by_their_forward_method(model, data):
    """FSDP gathers a layer's weights around its `forward`: other methods must not use the weights."""
    inside, strays = [0], []

    def enter(*_):
        inside[0] += 1

    def leave(*_):
        inside[0] -= 1

    def used(module, _):
        if not inside[0]:
            strays.append(module)

    units = [*model.vision.encoder["layers"], *model.language.layers, *model.expert.layers]
    for unit in units:
        unit.register_forward_pre_hook(enter)
        unit.register_forward_hook(leave)
        for part in unit.modules():
            if part is not unit:
                part.register_forward_pre_hook(used)
    sample(model, model.prefix(inputs_of(data), output=True), data["noise"], 2)
    assert strays == []


def test_initial_weights_depend_on_the_seed(model, name):
    spec = spec_of(name)
    one, two, other = build(spec), build(spec), build(spec)
    for made, seed in ((one, 3), (two, 3), (other, 4)):
        made.initialize(seed)
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(one.action_in_proj.weight, other.action_in_proj.weight)
    identity = 0.0 if spec.language.gemma else 1.0
    assert (one.language.norm.weight == identity).all()
    assert (one.vision.post_layernorm.weight == 1).all()
    assert one.action_in_proj.bias.std() > 0.5  # queries that are not of the noise alone
    images = inputs_of(recorded(name)).images.flatten(0, 1)
    with torch.no_grad():
        bare = one.vision.post_layernorm(one.vision.embeddings(images))
        torch.testing.assert_close(one.vision(images), bare)  # the tower's blocks add nothing at first
    places = one.vision.embeddings.position_embedding.weight.detach()
    near, far = (places[1] - places[0]).norm(), (places[-1] - places[0]).norm()
    assert 0 < near < far
    patch = one.vision.embeddings.patch_embedding.weight.detach()
    color, chequers = patch.mean((2, 3)).square().sum(), (patch * torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(
        patch.shape[2] // 2, patch.shape[3] // 2)).mean((2, 3)).square().sum()  # fmt: skip
    assert color > 100 * chequers  # whole colors are seen, single pixels are not
    if name == "pi05":
        assert not one.expert.norm.dense.weight.any()
        assert (one.expert.norm.dense.bias.unflatten(0, (3, -1)).std(1) == 0).all()
        assert one.expert.norm.dense.bias.unflatten(0, (3, -1))[:, 0].tolist() == [0.0, 0.0, 1.0]
    data = recorded(name)
    with torch.no_grad():
        actions = sample(one, one.prefix(inputs_of(data)), data["noise"], 2)
    assert actions.isfinite().all()


def test_time_embedding_matches_hand_computed_values():
    """Width 4: periods 4e-3 and 4; t = 1e-3 is a quarter of the first."""
    found = embed_time(torch.tensor([1e-3, 1.0]), 4)
    quarter = torch.tensor([1.0, 1.570796e-3, 0.0, 1.0])
    torch.testing.assert_close(found[0], quarter, atol=1e-5, rtol=0.0)
    torch.testing.assert_close(found[1, 1::2], torch.tensor([1.0, 0.0]), atol=1e-5, rtol=0.0)


@pytest.mark.parametrize(
    ("spec", "backbone", "expert"),
    [
        (PI0, 2_923_335_408, 311_464_960),
        (PI05, 2_923_335_408, 311_464_960 + 37 * 1024 * (3 * 1024 + 3 - 1)),
        (SMOLVLA, 86_433_024 + 11_796_480 + 204_626_880, 98_245_840),
    ],
    ids=["pi0", "pi05", "smolvla"],
)
def test_model_sizes_match_the_published_sizes(spec, backbone, expert):
    """PaliGemma; adaRMS adds a layer to each of 37 norms; SmolVLA has 450.0 M with an output matrix of 47.3 M."""
    with torch.device("meta"):
        model = build(spec)
    assert sum(p.numel() for p in backbone_of(model)) == backbone
    assert sum(p.numel() for p in model.expert.parameters()) == expert
