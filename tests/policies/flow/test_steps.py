"""Flow steps against RLinf's methods (see the metadata of the file) and their definitions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from embodyrl.policies.flow.likelihood import flow_cps, flow_noise, flow_sde, get_step_times, ode
from embodyrl.policies.flow.policy import NoiseHead
from embodyrl.policies.vla.chains import Transition

GOLDEN = Path(__file__).parents[2] / "golden" / "flow" / "flow_steps.safetensors"
WEIGHTS = "noise_net.mlp_logvar."
METHODS = ("flow_ode", "flow_sde", "flow_cps", "flow_noise")


def noise_head(golden: dict[str, Tensor], low: float, high: float) -> NoiseHead:
    head = NoiseHead(golden["suffix"].shape[-1], golden["x"].shape[-1], low, high)
    weights = {name.removeprefix("noise_net."): w for name, w in golden.items() if name.startswith(WEIGHTS)}
    head.load_state_dict(weights)  # strict: RLinf's names are ours
    return head


def ours(golden: dict[str, Tensor], facts: dict[str, str]) -> dict[str, Tensor]:
    """Return the values in the file of each method and step, and entropies, by name."""
    steps, level = int(facts["K"]), torch.tensor(float(facts["noise_level"]))
    low, high = map(float, facts["noise_range"].split(","))
    head = noise_head(golden, low, high)
    x, v = golden["x"], golden["v"]
    found = {"noise_net.logvar_min": torch.tensor([head._low]), "noise_net.logvar_max": torch.tensor([head._high])}
    for index in range(steps):
        t, end = get_step_times(torch.full((len(x),), index), steps)
        with torch.no_grad():
            made = {
                "flow_ode": ode(x, v, t, end),
                "flow_sde": flow_sde(x, v, t, end, level),
                "flow_cps": flow_cps(x, v, t, end, level),
                "flow_noise": flow_noise(x, v, t, end, head(golden["suffix"])),
            }
        for method, step in made.items():
            std = step.std.expand_as(x)
            after = golden[f"{method}.{index}.mean"] + golden[f"{method}.{index}.std"] * golden["eps"]
            name = f"{method}.{index}"
            found |= {f"{name}.t": t.flatten(), f"{name}.mean": step.mean, f"{name}.std": std}
            found |= {f"{name}.logprob": step.log_prob(after), f"{name}.entropy": step.entropy()}
    return found


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN)


@pytest.fixture(scope="module")
def facts() -> dict[str, str]:
    with safe_open(GOLDEN, "pt") as file:
        return file.metadata()


def errors(golden: dict[str, Tensor], facts: dict[str, str]) -> dict[str, float]:
    given = {"x", "v", "eps", "suffix"} | {name for name in golden if name.startswith(WEIGHTS)}
    found = ours(golden, facts)
    assert golden.keys() - found.keys() == given
    return {name: float((found[name] - golden[name]).abs().max()) for name in found.keys() & golden.keys()}


def test_denoising_steps_match_the_published_code(golden, facts):
    assert max(errors(golden, facts).values()) < 2e-5


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_golden_comparison_detects_changed_values(golden, facts, factor):
    """All nonzero tensors, including inputs and weights."""
    unseen = []
    for name, tensor in golden.items():
        if tensor.any() and max(errors(golden | {name: tensor * factor}, facts).values()) < 1e-4:
            unseen.append(name)
    assert unseen == []


def test_entropy_matches_a_gaussian(golden, facts):
    found = ours(golden, facts)
    for method in METHODS:
        for index in range(int(facts["K"])):
            std = golden[f"{method}.{index}.std"].double()
            expected = torch.where(std > 0, 0.5 * torch.log(2 * math.pi * math.e * std.square()), torch.zeros_like(std))
            torch.testing.assert_close(
                found[f"{method}.{index}.entropy"].double(), expected, rtol=1e-5, atol=1e-5, check_dtype=False
            )


def test_log_prob_and_gradient_match_torch():
    generator = torch.Generator().manual_seed(0)
    mean, after = torch.randn(2, 3, 4, generator=generator, requires_grad=True), torch.randn(2, 3, 4)
    std = torch.full((2, 1, 1), 0.3)
    found = Transition(mean=mean, std=std).log_prob(after)
    torch.testing.assert_close(found, torch.distributions.Normal(mean, std).log_prob(after))
    (gradient,) = torch.autograd.grad(found.sum(), mean)
    torch.testing.assert_close(gradient, ((after - mean) / std.square()).detach())


def test_deterministic_step_has_finite_gradients():
    mean, level = torch.ones(1, 2, 3, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    step = flow_cps(mean, mean, *get_step_times(torch.tensor([3]), 4), level)
    value = step.log_prob(torch.zeros(1, 2, 3)).sum() + step.entropy().sum()
    assert value == 0
    assert all(g.isfinite().all() for g in torch.autograd.grad(value, (mean, level)))


@pytest.mark.parametrize("steps", [1, 3, 7, 10])
def test_last_denoising_step_is_deterministic(steps):
    """For any rounding of 1 - i/steps, the last step of CPS is deterministic, and its mean equals the ODE's."""
    x, v = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    t, end = get_step_times(torch.full((2,), steps - 1), steps)
    assert (end == 0).all()
    level = torch.tensor(0.5)
    assert (flow_cps(x, v, t, end, level).std == 0).all()
    torch.testing.assert_close(flow_cps(x, v, t, end, level).mean, ode(x, v, t, end).mean)
    assert (flow_sde(x, v, t, end, level).std > 0).all()


def test_flow_sde_has_the_marginals_of_the_flow_ode():
    """Flow-GRPO writes x - d (v + s^2 / (2t) (x + (1 - t) v)); both SDE and CPS keep the marginal N(0, s0^2) flows."""
    steps, level, spread = 400, torch.tensor(0.7), 0.5
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20_000, 1, 1, generator=generator)
    states = {flow_sde: x, flow_cps: x}
    for index in range(steps):
        t, end = get_step_times(torch.tensor([index]), steps)
        for method, state in states.items():
            variance = (1 - t) ** 2 * spread**2 + t**2  # of x_t, for data N(0, spread^2)
            v = (t - (1 - t) * spread**2) / variance * state  # the exact velocity
            step = method(state, v, t, end, level if method is flow_sde else level / 20)
            if method is flow_sde:
                s2 = level**2 * t / (1 - torch.where(t >= 1, end, t))
                other = state - (t - end) * (v + s2 / (2 * t) * (state + (1 - t) * v))
                torch.testing.assert_close(step.mean, other, rtol=1e-4, atol=1e-5)
            states[method] = step.mean + step.std * torch.randn(state.shape, generator=generator)
    for method, state in states.items():
        assert float(state.std()) == pytest.approx(spread, rel=0.05), method.__name__


def test_untrained_noise_head_returns_the_geometric_mean():
    head = NoiseHead(8, 3, 0.08, 0.16)
    assert torch.allclose(head(torch.randn(2, 5, 8)), torch.tensor(math.sqrt(0.08 * 0.16)))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=100.0)
    std = head(torch.randn(50, 5, 8))
    assert std.min() >= 0.08 * (1 - 1e-5)
    assert std.max() <= 0.16 * (1 + 1e-5)
