"""Recorded tensors of openpi and lerobot (tests/golden/flow/README.md) are reproduced.

Tolerances are relative to the largest expected number: 2e-5 for one pass, 1e-4 for ten steps and for gradients, which
allows for other processors. A change of each tensor by 2 % must fail.
"""

import pytest
import torch
from golden_flow import NAMES, about, inputs_of, loss_of, model_of, recorded, sample

from embodyrl.policies.flow.layouts import OPENPI, SMOLVLA_LEROBOT

ONE_PASS, TEN_STEPS, GRADIENT = 2e-5, 1e-4, 1e-4


@pytest.fixture(scope="module")
def models():
    return {name: model_of(name) for name in NAMES}


def errors(name, model, data):
    """Return (maximum error relative to the maximum number, tolerance) by name of the recorded tensor."""
    return (smolvla if name == "smolvla" else pi0)(model, data)


def relative(actual, expected):
    assert actual.shape == expected.shape
    assert expected.dtype == torch.float32
    return float((actual - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def pi0(model, data):
    inputs = inputs_of(data)
    embeddings, _ = model.embed_prefix(inputs)
    prefix = model.prefix(inputs)
    velocity = model.denoise(model.memory(prefix), data["noise"], data["time"]).velocity
    actions = sample(model, prefix, data["noise"], 10)
    return {
        "prefix_embeddings": (relative(embeddings, data["prefix_embeddings"]), ONE_PASS),
        "velocity_of_noise_at_time": (relative(velocity, data["velocity_of_noise_at_time"]), ONE_PASS),
        "actions_10_steps": (relative(actions, data["actions_10_steps"]), TEN_STEPS),
    }


def smolvla(model, data):
    inputs, found = inputs_of(data), {}
    with torch.no_grad():
        embeddings, valid = model.embed_prefix(inputs)
        embeddings = torch.cat([embeddings, model.state_proj(inputs.state)[:, None]], dim=1)
        prefix = model.prefix(inputs)
        velocity = model.denoise(model.memory(prefix), data["noise"], torch.ones(1)).velocity
        for steps in (1, 4, 10):
            actions = sample(model, prefix, data["noise"], steps)
            found[f"sampled_{steps}"] = relative(actions, data[f"sampled_{steps}"]), TEN_STEPS
    valid = torch.cat([valid, valid.new_ones(2, 1)], dim=1)
    found["prefix_mask"] = float((valid != data["prefix_mask"]).sum()), 0.0
    found["prefix_embeddings"] = relative(embeddings, data["prefix_embeddings"]), ONE_PASS
    found["velocity_of_noise_at_1"] = relative(velocity, data["velocity_of_noise_at_1"]), ONE_PASS
    loss = loss_of(model, model.prefix(inputs), data["actions"], data["noise"], data["time"])
    found["loss"] = relative(loss.detach(), data["loss"]), ONE_PASS
    model.zero_grad()
    loss.mean().backward()
    for key in data:
        if key.startswith("grad."):
            parameter = model.get_parameter(SMOLVLA_LEROBOT.ours(key.removeprefix("grad.")))
            found[key] = relative(parameter.grad, data[key]), GRADIENT
    return found


@pytest.mark.parametrize("name", NAMES)
def test_model_outputs_match_recorded_tensors(name, models):
    found = errors(name, models[name], recorded(name))
    assert {key: error for key, (error, allowed) in found.items() if error > allowed} == {}


@pytest.mark.parametrize("name", NAMES)
def test_parameters_without_gradient_match_golden_values(name, models):
    """Parameters without influence on actions: the last language layer without keys and values, and the next norm."""
    model, data = models[name], recorded(name)
    model.zero_grad()
    noise, time = data["noise"], data["time"]
    loss_of(model, model.prefix(inputs_of(data)), torch.zeros_like(noise), noise, time).mean().backward()
    layout = SMOLVLA_LEROBOT if name == "smolvla" else OPENPI
    without = {layout.theirs(key) for key, parameter in model.named_parameters() if parameter.grad is None}
    if name == "smolvla":
        assert without == set(about(name)["without_gradient"]) - {key for key, _ in layout.dead}
    else:
        last = "paligemma_with_expert.paligemma.model.language_model.layers.3."
        assert all(key.startswith(last) or key.endswith("language_model.norm.weight") for key in without)
        assert len(without) == 7


def tampered(tensor):
    if tensor.dtype == torch.bool:
        return ~tensor
    return tensor * 1.02 if tensor.is_floating_point() else tensor.roll(1, dims=-1)


KEYS = [(name, key) for name in NAMES for key in recorded(name) if (name, key) != ("pi05", "state")]
"""pi0.5 does not use the recorded state, because its state is text."""


@pytest.mark.parametrize(("name", "key"), KEYS)
def test_changed_recorded_tensor_fails_the_comparison(name, key, models):
    data = recorded(name)
    data[key] = tampered(data[key])
    found = errors(name, models[name], data)
    assert any(error > allowed for error, allowed in found.values())
