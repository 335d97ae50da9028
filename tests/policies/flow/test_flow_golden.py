"""Recorded tensors of openpi and lerobot (tests/golden/flow/README.md) are reproduced.

Limits are multiples of the difference between our float32 and float64 results, measured by the test, relative to the
largest expected number. A change of each tensor by 2 % must fail.
"""

import copy

import pytest
import torch
from golden_flow import NAMES, about, inputs_of, loss_of, model_of, recorded, sample

from embodyrl.policies.flow.layouts import OPENPI, SMOLVLA_LEROBOT

MARGIN, ULPS = 32, 8 * torch.finfo(torch.float32).eps
"""Tolerated multiples of our own difference to float64, and of the unit in the last place of the maximum."""


@pytest.fixture(scope="module")
def models():
    return {name: model_of(name) for name in NAMES}


@pytest.fixture(scope="module")
def limits(models):
    """Return the tolerance of each recorded tensor by name of the model, from our float32 and float64 results."""

    def measure(name):
        single = results(name, models[name], recorded(name))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            data = {k: v.double() if v.dtype == torch.float32 else v for k, v in recorded(name).items()}
            double = results(name, copy.deepcopy(models[name]).double(), data)
        return {key: MARGIN * relative(single[key], double[key]) + ULPS for key in single}

    return {name: measure(name) for name in NAMES}


def errors(name, model, data, limits):
    """Return (maximum error relative to the maximum number, tolerance) by name of the recorded tensor."""
    found = {key: (relative(ours, data[key]), limits[name][key]) for key, ours in results(name, model, data).items()}
    if name == "smolvla":
        _, valid = model.embed_prefix(inputs_of(data))
        valid = torch.cat([valid, valid.new_ones(2, 1)], dim=1)
        found["prefix_mask"] = float((valid != data["prefix_mask"]).sum()), 0.0
    return found


def results(name, model, data):
    """Return our values of recorded tensors."""
    return (smolvla if name == "smolvla" else pi0)(model, data)


def relative(actual, expected):
    assert actual.shape == expected.shape
    assert expected.is_floating_point()
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


@torch.no_grad()
def pi0(model, data):
    inputs = inputs_of(data)
    embeddings, _ = model.embed_prefix(inputs)
    prefix = model.prefix(inputs)
    velocity = model.denoise(model.memory(prefix), data["noise"], data["time"]).velocity
    actions = sample(model, prefix, data["noise"], 10)
    return {"prefix_embeddings": embeddings, "velocity_of_noise_at_time": velocity, "actions_10_steps": actions}


def smolvla(model, data):
    inputs, found = inputs_of(data), {}
    with torch.no_grad():
        embeddings, _ = model.embed_prefix(inputs)
        found["prefix_embeddings"] = torch.cat([embeddings, model.state_proj(inputs.state)[:, None]], dim=1)
        prefix = model.prefix(inputs)
        ones = torch.ones(1, dtype=inputs.state.dtype)
        found["velocity_of_noise_at_1"] = model.denoise(model.memory(prefix), data["noise"], ones).velocity
        for steps in (1, 4, 10):
            found[f"sampled_{steps}"] = sample(model, prefix, data["noise"], steps)
    loss = loss_of(model, model.prefix(inputs), data["actions"], data["noise"], data["time"])
    found["loss"] = loss.detach()
    model.zero_grad()
    loss.mean().backward()
    for key in data:
        if key.startswith("grad."):
            found[key] = model.get_parameter(SMOLVLA_LEROBOT.to_local(key.removeprefix("grad."))).grad
    return found


@pytest.mark.parametrize("name", NAMES)
def test_model_outputs_match_recorded_tensors(name, models, limits):
    found = errors(name, models[name], recorded(name), limits)
    assert {key: error for key, (error, allowed) in found.items() if error > allowed} == {}


@pytest.mark.parametrize("name", NAMES)
def test_parameters_without_gradient_match_golden_values(name, models):
    """Parameters without influence on actions: the last language layer without keys and values, and the next norm."""
    model, data = models[name], recorded(name)
    model.zero_grad()
    noise, time = data["noise"], data["time"]
    loss_of(model, model.prefix(inputs_of(data)), torch.zeros_like(noise), noise, time).mean().backward()
    layout = SMOLVLA_LEROBOT if name == "smolvla" else OPENPI
    without = {layout.to_external(key) for key, parameter in model.named_parameters() if parameter.grad is None}
    if name == "smolvla":
        assert without == set(about(name)["without_gradient"]) - {key for key, _ in layout.unused}
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
def test_changed_recorded_tensor_fails_the_comparison(name, key, models, limits):
    data = recorded(name)
    data[key] = tampered(data[key])
    found = errors(name, models[name], data, limits)
    assert any(error > allowed for error, allowed in found.values())
