"""RL with continuous heads: log-probabilities against explicit formulas, and gradient checks."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from embodyrl.config.paths import resolve_asset
from embodyrl.policies.openvla_oft import heads
from embodyrl.policies.openvla_oft import model as oft_model
from embodyrl.policies.openvla_oft.settings import get_chunk_record
from embodyrl.policies.vla.sampling import START, TIMES, sample_normals, sample_uniforms
from embodyrl.types import BenchmarkSpec, Observation

TINY = resolve_asset("assets/openvla_oft_tiny")
HEADS = {
    "l1": {"action_head": "l1"},
    "diffusion, one step": {"action_head": "diffusion", "num_diffusion_steps_inference": 4},
    "diffusion, all steps": {
        "action_head": "diffusion",
        "num_diffusion_steps_inference": 3,
        "stochastic_steps": "all",
        "diffusion_eta": 0.5,
        "diffusion_min_std": 0.05,
    },
}


def observe(count: int, seed: int = 0) -> Observation:
    rng = np.random.default_rng(seed)
    return Observation(
        images=rng.integers(0, 256, (count, 1, 64, 64, 3), np.uint8),
        state=np.zeros((count, 0), np.float32),
        instructions=tuple(("put the", "pick up the black bowl")[i % 2] for i in range(count)),
    )


@pytest.fixture(params=HEADS)
def policy(request, make_policy, env_spec):
    env = dataclasses.replace(env_spec, benchmark=BenchmarkSpec(unnorm_key="libero_10"))
    return make_policy(TINY, env=env, num_action_chunks=2, value_dim=1, temperature=1.3, **HEADS[request.param])


def part(obs: Observation, rows: slice) -> Observation:
    return Observation(images=obs.images[rows], state=obs.state[rows], instructions=obs.instructions[rows])


def uniform(policy, count: int) -> np.ndarray:
    return np.random.default_rng(5).random((count, policy.spec.tokens_per_chunk), dtype=np.float32)


def test_continuous_log_probs_are_batch_independent(policy):
    obs = observe(6)
    out = policy.act(obs, noise=uniform(policy, 6))
    assert out.tokens.shape == out.logprob.shape == (6, policy.spec.tokens_per_chunk)
    shares = out.logprob.reshape(6, policy.spec.num_action_chunks, -1)
    scored = policy.spec.scored or shares.shape[2]
    assert shares[..., scored - 1].all()
    assert not shares[..., scored:].any()
    scores = policy.score(obs, out.tokens)
    np.testing.assert_allclose(scores.logprob.detach().numpy(), out.logprob, atol=1e-5, rtol=0)
    np.testing.assert_allclose(scores.value.detach().numpy(), out.value, atol=1e-5, rtol=0)
    rows = slice(2, 5)
    alone = policy.score(part(obs, rows), out.tokens[rows])
    np.testing.assert_allclose(alone.logprob.detach().numpy(), out.logprob[rows], atol=1e-5, rtol=0)
    again = policy.act(part(obs, rows), noise=uniform(policy, 6)[rows])
    np.testing.assert_allclose(again.actions, out.actions[rows], atol=1e-4)
    np.testing.assert_allclose(policy.values(obs), out.value, atol=1e-5, rtol=0)
    other = policy.act(obs, noise=1 - uniform(policy, 6))
    assert np.abs(other.actions - out.actions).max() > 1e-3
    assert not policy.act(obs, noise=None).logprob.any()


def test_continuous_gradients_match_finite_differences(policy):
    """Along the direction of the gradient, where float32 rounding has the smallest effect."""
    obs = observe(2)
    tokens = policy.act(obs, noise=uniform(policy, 2)).tokens
    weights = [p for p in policy.module.parameters() if p.requires_grad]
    policy.score(obs, tokens).logprob.sum().backward()
    moved = [p for p in weights if p.grad is not None and p.grad.any()]
    steep = [p.grad.clone() for p in moved]
    slope = sum(float(g.double().square().sum()) for g in steep)
    size = 2e-3 / math.sqrt(slope)

    def value(factor: float) -> float:
        with torch.no_grad():
            for p, g in zip(moved, steep, strict=True):
                p.add_(g, alpha=factor)
            found = float(policy.score(obs, tokens).logprob.double().sum())
            for p, g in zip(moved, steep, strict=True):
                p.sub_(g, alpha=factor)
        return found

    found = (value(size) - value(-size)) / (2 * size)
    assert found == pytest.approx(slope, rel=0.03)
    felt = [name for name, p in policy.module.named_parameters() if p.grad is not None and p.grad.any()]
    names = {name.partition(".")[0] for name in felt}
    assert {"vision_backbone", "projector", "language_model", "action_head"} <= names
    assert names & {"action_scale", "noisy_action_projector"}


def normal(value: float, mean: float, std: float) -> float:
    return -0.5 * ((value - mean) / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)


def test_l1_gaussian_matches_the_formula(make_policy, env_spec):
    env = dataclasses.replace(env_spec, benchmark=BenchmarkSpec(unnorm_key="libero_10"))
    policy = make_policy(TINY, env=env, num_action_chunks=2, temperature=1.3, action_head="l1", action_std=0.2)
    obs = observe(2)
    out = policy.act(obs, noise=uniform(policy, 2))
    mean, _ = policy.module(policy._build_inputs(obs))
    drawn = out.tokens.astype(np.int32).view(np.float32)
    pairs = zip(drawn.flatten().tolist(), mean.flatten().tolist(), strict=True)
    want = np.reshape([normal(x, m, 0.2 * 1.3) for x, m in pairs], out.logprob.shape)
    np.testing.assert_allclose(out.logprob, want, atol=1e-4)
    entropy = policy.score(obs, out.tokens).entropy.detach().numpy()
    np.testing.assert_allclose(entropy, 0.5 * math.log(2 * math.pi * math.e * (0.2 * 1.3) ** 2), rtol=1e-5)


def test_diffusion_chain_matches_the_formulas(make_policy, env_spec):
    """All steps of a chain, computed from model outputs (arXiv 2010.02502, 2409.00588)."""
    keys = HEADS["diffusion, all steps"]
    env = dataclasses.replace(env_spec, benchmark=BenchmarkSpec(unnorm_key="libero_10"))
    policy = make_policy(TINY, env=env, num_action_chunks=2, temperature=1.0, **keys)
    obs = observe(1)
    out = policy.act(obs, noise=uniform(policy, 1))
    record, model, inputs = get_chunk_record(policy._cfg), policy.module, policy._build_inputs(obs)
    _, floats = record.layout.unpack(out.tokens)
    states = torch.from_numpy(floats).view(3, 1, 2, 7)
    alphas, total = heads.build_ddim_schedule(3).alphas_cumprod.double(), torch.zeros(1, 2, 7, dtype=torch.float64)
    prefix = model.prefix(inputs)
    for before, after, (level, lower) in ((states[0], states[1], (16, 0)), (states[1], states[2], (0, None))):
        with torch.no_grad():
            noise = oft_model.predict_noise(model, inputs, prefix, before, torch.tensor([level])).double()
        now, then = alphas[level], torch.tensor(1.0).double() if lower is None else alphas[lower]
        clean = ((before - (1 - now).sqrt() * noise) / now.sqrt()).clamp(-1, 1)
        sigma = 0.5 * ((1 - then) / (1 - now) * (1 - now / then)).sqrt()
        mean, std = then.sqrt() * clean + (1 - then - sigma**2).sqrt() * noise, max(float(sigma), 0.05)
        total += torch.distributions.Normal(mean, std).log_prob(after.double())
    first = torch.from_numpy(out.logprob).view(1, 2, -1)[..., :7].double() - total
    # What is left is the first state and the step that leads to the first kept one.
    assert heads.build_ddim_schedule(3).timesteps.tolist() == [32, 16, 0]
    chain = policy._head._chain
    start = sample_normals(out.tokens[:, 0], START, (2, 7), torch.device("cpu"))
    with torch.no_grad():
        step, _ = chain._step(policy._head._build_velocity(inputs, prefix), start, torch.tensor([0]))
    gaussian = torch.distributions.Normal
    rest = gaussian(0.0, 1.0).log_prob(start) + gaussian(step.mean, step.std).log_prob(states[0])
    torch.testing.assert_close(first.float(), rest, atol=2e-4, rtol=0)


def test_diffusion_sft_loss_is_the_noise_prediction_error(make_policy, env_spec):
    """Denoising diffusion (arXiv 2006.11239, equation 14): x_t = sqrt(a) x + sqrt(1 - a) e."""
    env = dataclasses.replace(env_spec, benchmark=BenchmarkSpec(unnorm_key="libero_10"))
    policy = make_policy(TINY, env=env, num_action_chunks=2, **HEADS["diffusion, one step"])
    model, inputs, rows = policy.module, policy._build_inputs(observe(3)), np.arange(3)
    target = np.random.default_rng(1).uniform(-1, 1, (3, 2, 7))
    noise = sample_normals(rows, START, (2, 7), torch.device("cpu"))
    level = torch.from_numpy((sample_uniforms(rows, TIMES, 1)[:, 0] * 50).astype(np.int64))
    alpha = heads.build_ddim_schedule(4).alphas_cumprod[level][:, None, None]
    with torch.no_grad():
        noisy = alpha.sqrt() * torch.from_numpy(target).float() + (1 - alpha).sqrt() * noise
        found = oft_model.predict_noise(model, inputs, model.prefix(inputs), noisy, level)
        loss = policy._head.imitate(inputs, target).loss
    torch.testing.assert_close(loss, (found - noise).square().mean((1, 2)), rtol=1e-4, atol=1e-5)


def test_diffusion_critic_uses_zero_noise(make_policy, env_spec):
    env = dataclasses.replace(env_spec, benchmark=BenchmarkSpec(unnorm_key="libero_10"))
    policy = make_policy(TINY, env=env, num_action_chunks=2, value_dim=1, **HEADS["diffusion, one step"])
    model, inputs = policy.module, policy._build_inputs(observe(3))
    with torch.no_grad():
        for parameter in model.value_head.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
        prefix, middle = model.prefix(inputs), torch.zeros(3, 2, 7)
        hidden = oft_model.compute_noisy_hidden(model, inputs, prefix, middle, torch.full((3,), 49))[:, 0]
        expected = model.value_head(hidden).numpy()
    np.testing.assert_allclose(policy.values(observe(3)), expected, atol=1e-5)


@pytest.mark.parametrize("head", ["l1", "diffusion, one step"])
def test_rl_components_are_saved(head, make_policy, env_spec, tmp_path):
    env = dataclasses.replace(env_spec, benchmark=BenchmarkSpec(unnorm_key="libero_10"))
    keys = {"env": env, "num_action_chunks": 2, "value_dim": 1} | HEADS[head]
    policy = make_policy(TINY, **keys)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(0.01)
    policy.save(tmp_path / "saved")
    again, obs, noise = make_policy(tmp_path / "saved", **keys), observe(2), uniform(policy, 2)
    for one, other in zip(policy.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(one, other)
    np.testing.assert_array_equal(again.act(obs, noise=noise).logprob, policy.act(obs, noise=noise).logprob)


def test_diffusion_trains_with_sft(make_policy, env_spec):
    env = dataclasses.replace(env_spec, benchmark=BenchmarkSpec(unnorm_key="libero_10"))
    policy = make_policy(TINY, env=env, num_action_chunks=2, **HEADS["diffusion, one step"])
    obs, actions = observe(2), policy.act(observe(2), noise=None).actions
    with torch.no_grad():
        first, same = policy.imitate(obs, actions), policy.imitate(obs, actions)
    assert torch.equal(first.loss, same.loss)
    assert first.accuracy.mean() > 0.9
    loss = policy.imitate(obs, actions).loss.mean()
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert policy.module.noisy_action_projector.fc1.weight.grad.any()
