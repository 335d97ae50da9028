"""Denoising chains: stored tokens are sufficient, log-probabilities agree, and only executed actions count."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from embodyrl.policies.flow.likelihood import ChainLikelihood, FpoLikelihood, flow_sde, get_step_times, integrate_ode
from embodyrl.policies.flow.policy import NoiseHead
from embodyrl.policies.flow.settings import FlowSettings, Likelihood
from embodyrl.policies.vla.records import ChunkShape, TokenLayout
from embodyrl.policies.vla.sampling import START, STEP, get_seeds, sample_normals, sample_uniforms

SHAPE = ChunkShape(horizon=6, width=5, executed=4, action_dim=3)
CPU = torch.device("cpu")
WAYS = {
    "sde one": {"likelihood": "flow_sde"},
    "sde one, not the last": {"likelihood": "flow_sde", "ignore_last": True},
    "sde all": {"likelihood": "flow_sde", "stochastic_steps": "all"},
    "sde mean": {"likelihood": "flow_sde", "stochastic_steps": "all", "joint_logprob": "mean"},
    "cps one": {"likelihood": "flow_cps"},
    "cps all": {"likelihood": "flow_cps", "stochastic_steps": "all"},
    "noise": {"likelihood": "flow_noise"},
    "noise mean": {"likelihood": "flow_noise", "joint_logprob": "mean"},
    "fpo": {"likelihood": "fpo"},
}


class Field(nn.Module):
    """A separate velocity field for each row, and noise that depends on the state."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.context = torch.randn(rows, 1, 8)
        self.body = nn.Sequential(nn.Linear(SHAPE.width + 9, 32), nn.Tanh(), nn.Linear(32, 16))
        self.out = nn.Linear(16, SHAPE.width)
        self.noise = NoiseHead(16, SHAPE.width, 0.08, 0.16)
        nn.init.normal_(self.noise.mlp_logvar.moduleList[-1].linear_1.weight, std=0.5)

    def over(self, rows: slice = slice(None)):
        context = self.context[rows]

        def velocity(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            beside = torch.cat([context, t[:, None, None]], 2).expand(-1, x.shape[1], -1)
            hidden = self.body(torch.cat([x, beside], 2))
            return self.out(hidden), hidden

        return velocity


def settings(**keys: Any) -> FlowSettings:
    return FlowSettings.model_validate({"model_type": "x", "num_steps": 4, **keys}, strict=False)


def likelihood(field: Field, **keys: Any) -> ChainLikelihood | FpoLikelihood:
    cfg = settings(**keys)
    if cfg.likelihood is Likelihood.fpo:
        return FpoLikelihood(cfg, SHAPE)
    return ChainLikelihood(cfg, SHAPE, field.noise if cfg.likelihood is Likelihood.flow_noise else None)


def seeds(count: int) -> np.ndarray:
    return get_seeds(np.random.default_rng(3).random((count, 4), dtype=np.float32))


@pytest.mark.parametrize("way", ["sde one, not the last", "cps one", "noise", "noise mean"])
def test_temperature_scales_the_standard_deviation_once(way):
    field, many = Field(8), seeds(8)
    chances = likelihood(field, **WAYS[way] | {"ignore_last": True})
    with torch.no_grad():
        tokens = chances.sample(field.over(), many, CPU, 1.0).tokens
    warm, cool = (chances.score(field.over(), tokens, CPU, temperature)[1] for temperature in (1.0, 0.5))
    steps = {"noise": 4, "noise mean": 4 / 5}.get(way, 1)
    assert (warm - cool).detach().numpy() == pytest.approx(steps * math.log(2.0), abs=1e-4)


def test_fpo_temperature_scales_the_initial_noise():
    """A flow with zero velocity ends at its initial noise."""

    def still(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(x), x

    chances = likelihood(Field(4), likelihood="fpo")
    warm, cool = (chances.sample(still, seeds(4), CPU, temperature).state for temperature in (1.0, 0.5))
    torch.testing.assert_close(cool, 0.5 * warm)
    assert warm.std() > 0.5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_flow_chain_sampled_and_recomputed_log_probs_agree(way, temperature):
    field, many = Field(16), seeds(16)
    chances = likelihood(field, **WAYS[way])
    with torch.no_grad():
        chosen = chances.sample(field.over(), many, CPU, temperature)
    assert chosen.tokens.shape == (16, chances.record.layout.tokens)
    assert chosen.tokens.dtype == np.int64
    assert chosen.logprob.shape == (16, SHAPE.executed, chances.record.per_action)
    logprob, entropy = chances.score(field.over(), chosen.tokens, CPU, temperature)
    assert logprob.requires_grad
    assert entropy.shape == logprob.shape
    assert float((logprob - chosen.logprob).detach().abs().max()) < 1e-5
    # Of the whole chunk too, and in other company: rows 3..5 alone, acting and scoring.
    rows = slice(3, 6)
    alone, _ = chances.score(field.over(rows), chosen.tokens[rows], CPU, temperature)
    assert float((alone - chosen.logprob[rows]).detach().sum((1, 2)).abs().max()) < 1e-4
    with torch.no_grad():
        again = chances.sample(field.over(rows), many[rows], CPU, temperature)
    torch.testing.assert_close(again.state, chosen.state[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_ratio_depends_on_the_weights_only(way):
    """Gradients reach the field; tokens of other rows have no effect."""
    field, many = Field(4), seeds(4)
    chances = likelihood(field, **WAYS[way])
    with torch.no_grad():
        tokens = chances.sample(field.over(), many, CPU, 1.0).tokens
    logprob, _ = chances.score(field.over(), tokens, CPU, 1.0)
    gradient = torch.autograd.grad(logprob[2].sum(), list(field.out.parameters()))
    assert all(float(g.abs().sum()) > 0 for g in gradient)
    changed = tokens.copy()
    changed[[0, 1, 3]] = changed[[1, 3, 0]]
    other, _ = chances.score(field.over(), changed, CPU, 1.0)
    assert torch.equal(other[2], logprob[2])


def test_record_size_matches_the_layout():
    """Mixed form: one state and the executed part of the next; two numbers per token."""
    field = Field(1)
    full, part = SHAPE.horizon * SHAPE.width, SHAPE.executed * SHAPE.action_dim
    expected = {
        "sde one": 1 + (full + part) / 2,
        "cps one": 1 + (full + part) / 2,
        "sde all": 1 + (3 * full + part) / 2,
        "noise": 1 + (3 * full + part) / 2,
        "fpo": 1 + full / 2,
    }
    assert {way: likelihood(field, **WAYS[way]).record.layout.tokens for way in expected} == expected


def test_mixed_chain_follows_the_ode_except_one_step():
    """Each row has its own step index, all indices occur, and the stored states are those around the step."""
    field, many = Field(64), seeds(64)
    cfg = settings()
    chances = ChainLikelihood(cfg, SHAPE, None)
    with torch.no_grad():
        chosen = chances.sample(field.over(), many, CPU, 1.0)
        x = sample_normals(many, START, (SHAPE.horizon, SHAPE.width), CPU)
        noise = sample_normals(many, STEP, (SHAPE.horizon, SHAPE.width), CPU)
        places = torch.from_numpy(chosen.tokens[:, 0])
        kept = torch.from_numpy(chosen.tokens[:, 1:].view(np.float32))[:, : SHAPE.horizon * SHAPE.width]
        for k in range(cfg.num_steps):
            t, end = get_step_times(torch.full((64,), k), cfg.num_steps)
            v, _ = field.over()(x, t.flatten())
            step = flow_sde(x, v, t, end, torch.tensor(cfg.noise_level))
            torch.testing.assert_close(kept[places == k], x.flatten(1)[places == k], rtol=0, atol=1e-5)
            x = torch.where((places == k)[:, None, None], step.mean + step.std * noise, x - v / cfg.num_steps)
    torch.testing.assert_close(chosen.state, x, rtol=0, atol=1e-5)
    assert set(places.tolist()) == {0, 1, 2, 3}
    last = settings(ignore_last=True), settings(likelihood="flow_cps")
    for other in last:
        with torch.no_grad():
            tokens = ChainLikelihood(other, SHAPE, None).sample(field.over(), many, CPU, 1.0).tokens
        assert set(tokens[:, 0].tolist()) == {0, 1, 2}


def test_joint_logprob_is_sum_or_mean_over_steps():
    field, many = Field(8), seeds(8)
    with torch.no_grad():
        total = likelihood(field, **WAYS["noise"]).sample(field.over(), many, CPU, 1.0)
        mean = likelihood(field, **WAYS["noise mean"]).sample(field.over(), many, CPU, 1.0)
        assert np.array_equal(total.tokens, mean.tokens)
        torch.testing.assert_close(total.logprob / 5, mean.logprob)
        x = sample_normals(many, START, (SHAPE.horizon, SHAPE.width), CPU)
        expected = torch.distributions.Normal(0, 1).log_prob(x)
        for k in range(4):
            v, hidden = field.over()(x, torch.full((8,), 1 - k / 4))
            step = torch.distributions.Normal(x - v / 4, field.noise(hidden))
            x = step.mean + step.stddev * sample_normals(many, STEP + k, (SHAPE.horizon, SHAPE.width), CPU)
            expected = expected + step.log_prob(x)
    torch.testing.assert_close(total.logprob, expected[:, :4, :3], rtol=1e-4, atol=1e-4)
    _, entropy = likelihood(field, **WAYS["noise"]).score(field.over(), total.tokens, CPU, 1.0)
    assert float(entropy.detach().min()) > 0.5 * math.log(2 * math.pi * math.e) * 5 + 4 * math.log(0.08)


@pytest.mark.parametrize("way", ["sde one", "fpo"])
def test_unexecuted_actions_do_not_affect_logprobs(way):
    """Rows beyond K and padding affect the velocity, but not the log-probability of the chunk."""
    field, many = Field(4), seeds(4)
    chances = likelihood(field, **WAYS[way])
    with torch.no_grad():
        chosen = chances.sample(field.over(), many, CPU, 1.0)
        logprob, _ = chances.score(field.over(), chosen.tokens, CPU, 1.0)
        field.out.bias[SHAPE.action_dim :] += 1.0
        moved, _ = chances.score(field.over(), chosen.tokens, CPU, 1.0)
    assert torch.equal(moved, logprob)


def test_fpo_ratio_is_the_difference_of_losses():
    """ratio = exp(mean(loss before - loss after))."""
    field, many = Field(4), seeds(4)
    average = likelihood(field, **WAYS["fpo"])
    with torch.no_grad():
        chosen = average.sample(field.over(), many, CPU, 1.0)
        torch.testing.assert_close(
            chosen.state, integrate_ode(field.over(), sample_normals(many, START, (6, 5), CPU), 4), rtol=0, atol=0
        )
        field.out.bias += 0.01
        new, entropy = average.score(field.over(), chosen.tokens, CPU, 1.0)
        assert (entropy == 0).all()
        assert not torch.equal(new, chosen.logprob)


def test_chain_noise_is_normal_and_depends_on_its_seed():
    many = seeds(200)
    drawn = sample_normals(many, STEP, (40, 5), CPU)
    assert float(drawn.mean()) == pytest.approx(0, abs=0.02)
    assert float(drawn.std()) == pytest.approx(1, abs=0.02)
    assert torch.equal(sample_normals(many[7:9], STEP, (40, 5), CPU), drawn[7:9])
    assert not torch.equal(sample_normals(many, STEP + 1, (40, 5), CPU), drawn)
    assert len(np.unique(many)) == 200
    assert many.min() >= 0
    assert many.max() < 2**48
    # The first two words of Philox4x64-10 with key (7, 4) and counter 1.
    words = [0x8D423250376698D9, 0x05597D97B5BC61DE]
    assert sample_uniforms(np.array([7]), 4, 2)[0].tolist() == [((word >> 11) + 0.5) / 2**53 for word in words]


def test_tokens_round_trip_exactly():
    layout = TokenLayout(integers=2, floats=5)
    floats = np.array([[0.1, -0.0, np.float32(1e-45), 3e38, -1.0]], np.float32)
    whole = np.array([[2**47 + 3, 1]])
    tokens = np.pad(layout.pack(whole, floats), ((0, 0), (0, 3)))  # tokens may be more than are filled
    back = layout.unpack(tokens)
    assert np.array_equal(back[0], whole)
    assert back[1].tobytes() == floats.tobytes()


def test_contradictory_flow_settings_are_reported():
    assert "leaves no stochastic step" in next(settings(num_steps=1, ignore_last=True).problems())
    assert "deterministic" in next(settings(num_steps=1, likelihood="flow_cps", stochastic_steps="all").problems())
    assert not list(settings(num_steps=1, likelihood="flow_noise").problems())
    assert not list(settings(likelihood="dsrl", num_steps=1).problems())


@pytest.mark.parametrize("way", ["sde one", "sde all", "cps one", "noise", "fpo"])
def test_policy_gradient_moves_chunks_towards_reward(way):
    """The log-probability of the better half of each batch increases; executed numbers move from 0 towards 1."""
    torch.manual_seed(1)
    field = Field(1)
    nn.init.zeros_(field.out.weight)
    nn.init.zeros_(field.out.bias)
    chances = likelihood(field, **WAYS[way])
    optimizer = torch.optim.Adam(field.parameters(), 0.01)
    context = field.context
    rewards = []
    for update in range(30):
        field.context = context.expand(64, -1, -1)
        many = get_seeds(np.random.default_rng(update).random((64, 2), dtype=np.float32))
        with torch.no_grad():
            chosen = chances.sample(field.over(), many, CPU, 1.0)
        reward = -(chosen.state[:, :4, :3] - 1.0).square().mean((1, 2))
        rewards.append(float(reward.mean()))
        advantage = (reward - reward.mean()) / reward.std()
        logprob, _ = chances.score(field.over(), chosen.tokens, CPU, 1.0)
        ratio = (logprob - chosen.logprob).sum((1, 2)).exp()
        optimizer.zero_grad()
        (-advantage * ratio).mean().backward()
        optimizer.step()
    assert rewards[-1] > 0.6 * rewards[0], rewards[::10]
