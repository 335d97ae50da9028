"""Sampling, log-probabilities and training of ACT and Diffusion Policy for any batch composition."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from golden_lerobot import fresh, noise_for, observe, policy_of, toy_env
from settings import model_of

from embodyrl.policies.protocol import POLICIES, PolicyRequest
from embodyrl.policies.soft_actor.protocol import SoftActor

KINDS = ("act", "diffusion")
SEEN = {"state": toy_env(), "images": toy_env(3, ("front", "wrist"))}


def build(kind, tmp_path, env, *, value_dim=0, trainable=True, start=None, **keys):
    folder = start or fresh(kind, tmp_path / f"{kind}{len(list(tmp_path.iterdir()))}")
    cfg = model_of(kind, path=str(folder), **({"num_action_chunks": 4} | keys))
    factory = POLICIES.get(kind)
    assert factory.validate(cfg) == []
    request = PolicyRequest(env=env, value_dim=value_dim, device="cpu", seed=0, trainable=trainable)
    policy = factory.build(cfg, request)
    assert policy.spec == factory.spec(cfg, env, value_dim)
    policy.costs = factory.costs(cfg, env, value_dim)
    return policy


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("kind", KINDS)
def test_lerobot_sampled_and_recomputed_log_probs_agree(kind, seen, tmp_path):
    policy, obs = build(kind, tmp_path, SEEN[seen], value_dim=1), observe(SEEN[seen], 3)
    out = policy.act(obs, noise=noise_for(policy, 3))
    assert out.actions.shape == (3, 4, 2)
    with torch.no_grad():
        scores = policy.score(obs, out.tokens)
    assert np.abs(scores.logprob.numpy() - out.logprob).max() < 1e-5
    assert np.abs(scores.value.numpy() - out.value).max() < 1e-5
    assert np.abs(policy.values(obs) - out.value).max() < 1e-5
    assert (out.logprob != 0).sum() >= 3 * 4 * 2


@pytest.mark.parametrize("steps", ["one", "all"])
@pytest.mark.parametrize("sampler", ["DDPM", "DDIM"])
def test_diffusion_chain_log_probs_match_the_samples(sampler, steps, tmp_path):
    policy = build("diffusion", tmp_path, SEEN["state"], sampler=sampler, stochastic_steps=steps)
    obs = observe(SEEN["state"], 4)
    out = policy.act(obs, noise=noise_for(policy, 4), temperature=1.0)
    scores = policy.score(obs, out.tokens)
    assert np.abs(scores.logprob.detach().numpy() - out.logprob).max() < 1e-4 * max(1, np.abs(out.logprob).max())
    scores.logprob.sum().backward()
    assert all(p.grad is not None for p in policy.module.network.unet.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_lerobot_actions_do_not_depend_on_the_batch(kind, tmp_path):
    env = SEEN["images"]
    policy, obs = build(kind, tmp_path, env), observe(env, 4)
    noise = noise_for(policy, 4)
    turned = type(obs)(images=obs.images[::-1], state=obs.state[::-1], instructions=obs.instructions)
    for some in (noise, None):
        there = policy.act(obs, noise=some)
        back = policy.act(turned, noise=None if some is None else some[::-1])
        assert np.abs(there.actions - back.actions[::-1]).max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_log_prob_gradients_match_finite_differences(kind, tmp_path):
    policy, obs = build(kind, tmp_path, SEEN["state"]), observe(SEEN["state"], 2)
    tokens = policy.act(obs, noise=noise_for(policy, 2)).tokens
    weight = (policy.module.network.action_head if kind == "act" else policy.module.network.unet.final_conv[1]).weight
    policy.score(obs, tokens).logprob.sum().backward()
    at = tuple(int(i) for i in np.unravel_index(int(weight.grad.abs().argmax()), weight.shape))
    values = []
    for step in (1e-3, -1e-3):
        with torch.no_grad():
            weight[at] += step
            values.append(float(policy.score(obs, tokens).logprob.double().sum()))
            weight[at] -= step
    assert (values[0] - values[1]) / 2e-3 == pytest.approx(float(weight.grad[at]), rel=2e-2)


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.integration
def test_sft_reduces_the_imitation_loss(kind, seen, tmp_path):
    env = SEEN[seen]
    policy, obs = build(kind, tmp_path, env), observe(env, 4)
    horizon = policy.spec.imitated
    actions = np.tile(np.tanh(obs.state[:, None, :2]), (1, horizon, 1)).astype(np.float32)
    optimizer = torch.optim.Adam(policy.module.parameters(), 1e-3)
    with torch.no_grad():
        before = policy.imitate(obs, actions)
        assert torch.equal(before.loss, policy.imitate(obs, actions).loss)
    policy.module.train()
    torch.manual_seed(0)  # training draws its noise from torch's generator
    for _ in range(40 if kind == "diffusion" else 15):
        optimizer.zero_grad()
        policy.imitate(obs, actions).loss.mean().backward()
        optimizer.step()
    policy.module.eval()
    with torch.no_grad():
        after = policy.imitate(obs, actions)
    assert after.loss.mean() < before.loss.mean()
    assert after.error.shape == after.loss.shape == (4,)


@pytest.mark.parametrize("likelihood", ["dsrl", "residual"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_added_actor_and_value_head_are_trainable(kind, likelihood, tmp_path):
    env = SEEN["images"]
    policy, obs = build(kind, tmp_path, env, likelihood=likelihood, value_dim=1), observe(env, 3)
    assert isinstance(policy, SoftActor)
    trained = {name.split(".")[0] for name, p in policy.module.named_parameters() if p.requires_grad}
    assert trained == {"noise_actor" if likelihood == "dsrl" else "residual_actor", "value_head"}
    out = policy.act(obs, noise=noise_for(policy, 3))
    scores = policy.score(obs, out.tokens)
    assert np.abs(scores.logprob.detach().numpy() - out.logprob).max() < 1e-5
    features = policy.features(obs)
    assert features.shape == (3, policy.costs.steering_features)
    drawn, _ = policy.sample(features)
    assert drawn.shape == (3, policy.width)
    critics = policy.build_critics(2, 0, layer_norm=False)
    # A critic sees the correction of each action; of a whole chunk the chosen numbers.
    assert critics(features, policy.tokens_to_chunks(out.tokens)).shape == (2, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_dsrl_noise_determines_the_action_chunk(kind, tmp_path):
    env = SEEN["state"]
    start = fresh(kind, tmp_path / "start")
    policy, obs = build(kind, tmp_path, env, likelihood="dsrl", start=start), observe(env, 3)
    plain = build(kind, tmp_path, env, start=start, **({"greedy_start": "zero"} if kind == "diffusion" else {}))
    last = policy.module.noise_actor.layers[-1]
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.zeros_(last.bias)
    calm = policy.act(obs, noise=None).actions
    assert np.abs(calm - plain.act(obs, noise=None).actions).max() < 1e-6
    with torch.no_grad():
        last.bias[: policy.width] = 1.0
    assert np.abs(policy.act(obs, noise=None).actions - calm).max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_zero_residual_gives_the_actions_of_the_frozen_model(kind, tmp_path):
    env, start = SEEN["state"], fresh(kind, tmp_path / "start")
    policy = build(kind, tmp_path, env, likelihood="residual", start=start)
    obs = observe(env, 3)
    proposed = policy.act(obs, noise=None).actions
    assert np.abs(proposed - build(kind, tmp_path, env, start=start).act(obs, noise=None).actions).max() < 1e-6
    shares = policy.normalize(proposed + 0.1, obs).detach()
    assert torch.allclose(shares, torch.full_like(shares, 0.5), atol=1e-4)


@pytest.mark.parametrize("repeated", [False, True])
def test_dsrl_noise_is_the_initial_denoising_sample(repeated, tmp_path):
    env = SEEN["state"]
    policy, obs = build("diffusion", tmp_path, env, likelihood="dsrl", noise_repeated=repeated), observe(env, 3)
    out = policy.act(obs, noise=noise_for(policy, 3))
    chosen = policy.tokens_to_chunks(out.tokens)
    assert chosen.shape == (3, 2 if repeated else 16)
    rows = 1.5 * (chosen[:, None].expand(-1, 8, -1) if repeated else chosen.view(3, 8, 2))
    with torch.no_grad():
        unet = partial(policy.module.network.unet, condition=policy._encode(obs).model)
        chunk = policy._schedule.denoise(unet, rows)
    assert np.abs(policy._to_actions(policy._select_executed(chunk)) - out.actions).max() < 1e-5


def test_dsrl_requires_an_act_model_with_a_latent(tmp_path):
    cfg = model_of("act", path=str(fresh("act", tmp_path / "act", use_vae=False)), likelihood="dsrl")
    assert "use_vae" in POLICIES.get("act").validate(cfg)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_count_does_not_import_torch(kind, tmp_path):
    for name, env in SEEN.items():
        policy = policy_of(fresh(kind, tmp_path / name), env=env)
        assert policy.costs.num_parameters == sum(p.numel() for p in policy.module.network.parameters()), name


def test_camera_frames_are_rotated_upright(tmp_path):
    env = SEEN["images"]
    obs = observe(env, 2)
    flipped = type(obs)(images=obs.images[:, :, ::-1, ::-1], state=obs.state, instructions=obs.instructions)
    start = fresh("act", tmp_path / "start")
    upright, turned = (
        build("act", tmp_path, e, start=start)
        for e in (env, replace(env, cameras=replace(env.cameras, rotation_deg=180)))
    )
    assert np.array_equal(upright.act(obs, noise=None).actions, turned.act(flipped, noise=None).actions)


@pytest.mark.parametrize("kind", KINDS)
def test_temperature_of_a_request_changes_the_log_probs(kind, tmp_path):
    policy, obs = build(kind, tmp_path, SEEN["state"]), observe(SEEN["state"], 3)
    noise = noise_for(policy, 3)
    plain, wide = (policy.act(obs, noise=noise, temperature=one) for one in (1.0, 2.0))
    assert not np.allclose(plain.actions, wide.actions)
    assert not np.allclose(plain.logprob, wide.logprob)


@pytest.mark.parametrize("kind", KINDS)
def test_constant_action_dimensions_have_no_log_prob(kind, tmp_path, monkeypatch):
    policy, obs = build(kind, tmp_path, SEEN["state"]), observe(SEEN["state"], 3)
    noise = noise_for(policy, 3)
    whole = policy.act(obs, noise=noise).logprob.reshape(3, 4, -1)
    monkeypatch.setattr(policy._normalizer, "get_varying_mask", lambda: torch.tensor([0.0, 1.0]))
    (again := tmp_path / "again").mkdir()
    policy.save(again)
    policy.load_weights(again)
    assert policy.spec.scored == 1
    out = policy.act(obs, noise=noise)
    scores = policy.score(obs, out.tokens)
    assert np.array_equal(out.logprob.reshape(3, 4, -1)[..., 0], whole[..., 1])
    for part in (out.logprob, scores.logprob.detach().numpy(), scores.entropy.detach().numpy()):
        counted = part.reshape(3, 4, -1)
        assert counted[..., 0].any()
        assert not counted[..., 1:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_value_loss_does_not_train_the_network(kind, tmp_path):
    policy, obs = build(kind, tmp_path, SEEN["state"], value_dim=1), observe(SEEN["state"], 3)
    policy.score(obs, policy.act(obs, noise=noise_for(policy, 3)).tokens).value.sum().backward()
    assert all(p.grad is None for p in policy.module.network.parameters())
    assert all(p.grad is not None for p in policy.module.value_head.parameters())
