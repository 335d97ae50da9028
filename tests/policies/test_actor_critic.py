"""Small actor-critic policies: distributions, shapes, log-probabilities and checkpoints."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from settings import model_of

from embodyrl.config.shared import Precision
from embodyrl.errors import CheckpointError
from embodyrl.policies import POLICIES
from embodyrl.policies.actor_critic.policy import GaussianHead, RunningMoments
from embodyrl.policies.protocol import LearnsStatistics, Policy, PolicyRequest, estimate_policy_costs
from embodyrl.types import ActionKind, ActionSpec, CameraSpec, EnvSpec, Observation

SPACES = {
    "discrete": ActionSpec(dim=1, kind=ActionKind.discrete, sizes=(3,)),
    "multi": ActionSpec(dim=3, kind=ActionKind.multi_discrete, sizes=(2, 4, 3)),
    "box": ActionSpec(dim=2, kind=ActionKind.box, low=(-2.0, 0.0), high=(2.0, 10.0)),
    "open": ActionSpec(dim=2, kind=ActionKind.box, low=(-math.inf, -1.0), high=(math.inf, math.inf)),
}


def env_spec(space: str, *, cameras: int = 0, state_dim: int = 5) -> EnvSpec:
    return EnvSpec(
        name="probe",
        action=SPACES[space],
        tasks=("",),
        states_per_task=(10,),
        cameras=CameraSpec(names=tuple(f"camera {i}" for i in range(cameras)), size=(9, 12) if cameras else (0, 0)),
        state_dim=state_dim,
    )


def build(name: str = "mlp", space: str = "discrete", **request: Any) -> Policy:
    env = request.pop("env", None) or env_spec(space)
    cfg = model_of(
        model_type=name,
        precision=Precision.fp32,
        num_action_chunks=request.pop("chunk", 1),
        hidden_sizes=[16, 8],
        ortho_init=request.pop("ortho_init", True),
        path=request.pop("path", None),
        squashed=request.pop("squashed", False),
        noise_correlation=request.pop("noise_correlation", 0.0),
    )
    defaults: dict[str, Any] = {"value_dim": 1, "temperature": 1.0, "device": "cpu", "seed": 3}
    policy = POLICIES.get(name).build(cfg, PolicyRequest(env=env, **(defaults | request)))
    policy.costs = estimate_policy_costs(cfg, env, (defaults | request)["value_dim"])
    return policy


def observe(policy_env: EnvSpec, count: int, seed: int = 0) -> Observation:
    rng = np.random.default_rng(seed)
    return Observation(
        images=rng.integers(
            0, 256, (count, len(policy_env.cameras.names), *policy_env.cameras.size, 3), dtype=np.uint8
        ),
        state=rng.normal(size=(count, policy_env.state_dim)).astype(np.float32),
        instructions=("",) * count,
    )


def shake(policy: Policy, scale: float = 0.5) -> Policy:
    """Randomize the weights, because new policies are nearly uniform."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return policy


def uniforms(count: int, policy: Policy) -> np.ndarray:
    return np.random.default_rng(5).random((count, policy.spec.tokens_per_chunk), dtype=np.float32)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(("name", "cameras"), [("mlp", 0), ("cnn", 2)])
def test_recomputed_log_probs_match_samples_exactly(name, cameras, space, temperature):
    env = env_spec(space, cameras=cameras)
    policy = shake(build(name, env=env, chunk=3, temperature=temperature))
    obs = observe(env, 7)
    out = policy.act(obs, noise=uniforms(7, policy))
    assert out.actions.shape == (7, 3, env.action.dim)
    assert out.tokens.dtype == np.int64
    scores = policy.score(obs, out.tokens)
    np.testing.assert_array_equal(scores.logprob.detach().numpy(), out.logprob)
    np.testing.assert_array_equal(scores.value.detach().numpy(), out.value)
    np.testing.assert_array_equal(policy.values(obs), out.value)
    for tensor in (scores.logprob.sum(), scores.entropy.sum(), scores.value.sum()):
        assert torch.isfinite(tensor)


@pytest.mark.parametrize("space", SPACES)
def test_every_parameter_is_trained(space):
    env = env_spec(space, cameras=1)
    policy = shake(build("cnn", env=env), 0.05)
    obs = observe(env, 4)
    scores = policy.score(obs, policy.act(obs, noise=uniforms(4, policy)).tokens)
    (scores.logprob.sum() + scores.value.sum()).backward()
    still = [name for name, p in policy.module.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert still == []


def test_policy_reads_only_the_first_cameras_that_it_needs():
    spec = env_spec("box", cameras=2)
    policy = shake(build("cnn", env=replace(spec, cameras=replace(spec.cameras, names=spec.cameras.names[:1]))))
    obs = observe(spec, 4)
    alone = replace(obs, images=np.ascontiguousarray(obs.images[:, :1]))
    both, first = (policy.act(seen, noise=None).actions for seen in (obs, alone))
    np.testing.assert_array_equal(both, first)
    turned = replace(obs, images=np.ascontiguousarray(obs.images[:, ::-1]))
    assert np.abs(both - policy.act(turned, noise=None).actions).max() > 1e-4


def test_gray_images_use_one_channel(tmp_path):
    colored = env_spec("discrete", cameras=2, state_dim=0)
    grey = replace(colored, cameras=replace(colored.cameras, grey=True))
    policy = shake(build("cnn", env=grey), 0.05)
    obs = observe(colored, 3)
    same = replace(obs, images=np.repeat(obs.images[..., :1], 3, -1))
    np.testing.assert_array_equal(policy.values(obs), policy.values(same))
    weights = policy.module.state_dict()
    assert weights["encoder.0.weight"].shape[1] == 2
    assert policy.costs.num_parameters == sum(weight.numel() for weight in weights.values())
    old = build("cnn", env=colored)
    old.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"grey is False \(this run needs True\)"):
        policy.load_weights(tmp_path)


def test_categories_are_sampled_with_their_probabilities():
    policy = shake(build(space="multi"))
    count = 20_000
    one = observe(env_spec("multi"), 1)
    obs = Observation(
        images=np.repeat(one.images, count, 0), state=np.repeat(one.state, count, 0), instructions=("",) * count
    )
    tokens = policy.act(obs, noise=uniforms(count, policy)).tokens
    for dim, size in enumerate((2, 4, 3)):
        trial = np.zeros((size, 3), np.int64)
        trial[:, dim] = np.arange(size)
        repeated = Observation(images=obs.images[:size], state=obs.state[:size], instructions=("",) * size)
        chances = policy.score(repeated, trial).logprob[:, dim].exp().detach().numpy()
        assert chances.sum() == pytest.approx(1.0, abs=1e-5)
        np.testing.assert_allclose(np.bincount(tokens[:, dim], minlength=size) / count, chances, atol=0.015)


def test_greedy_selects_the_most_probable_category():
    policy = shake(build(space="discrete"))
    obs = observe(env_spec("discrete"), 6)
    chances = np.stack([policy.score(obs, np.full((6, 1), k)).logprob[:, 0].detach().numpy() for k in range(3)], axis=1)
    np.testing.assert_array_equal(policy.act(obs, noise=None).tokens[:, 0], chances.argmax(1))


def test_gaussian_log_probs_and_entropy_match_torch():
    policy = shake(build(space="box", temperature=1.3))
    obs = observe(env_spec("box"), 50)
    out = policy.act(obs, noise=uniforms(50, policy))
    mean = policy.act(obs, noise=None).tokens.astype(np.int32).view(np.float32)
    sample = out.tokens.astype(np.int32).view(np.float32)
    log_std = dict(policy.module.named_parameters())["head.log_std"].detach()
    expected = torch.distributions.Normal(torch.from_numpy(mean), log_std.exp() * 1.3)
    np.testing.assert_allclose(out.logprob, expected.log_prob(torch.from_numpy(sample)).numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(policy.score(obs, out.tokens).entropy.detach(), expected.entropy(), rtol=1e-5)
    quantiles = torch.distributions.Normal(0.0, 1.0).cdf((torch.from_numpy(sample - mean)) / (log_std.exp() * 1.3))
    np.testing.assert_allclose(quantiles.numpy(), uniforms(50, policy), atol=1e-4)


@pytest.mark.parametrize("asked", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)])
@pytest.mark.parametrize("rows", ["one deviation for all", "one each"])
def test_gaussian_gradients_match_torch_distributions(rows, asked):
    """Gradients of log-probability, entropy and both, for Gaussian and squashed head; detects wrong factors, signs."""
    draw = torch.Generator().manual_seed(0)
    mean, choice, weight = torch.randn((3, 9, 2, 4), dtype=torch.float64, generator=draw)
    log_std = torch.randn(4 if rows == "one deviation for all" else (9, 2, 4), dtype=torch.float64, generator=draw)
    leaves, found = [mean.requires_grad_(), log_std.requires_grad_()], []
    head = GaussianHead((-1.0,) * 4, (1.0,) * 4, 0.0)
    head.get_mean_and_log_std = lambda outputs: (outputs, log_std)  # type: ignore[method-assign]
    for exact in (False, True):
        normal = torch.distributions.Normal(mean, log_std.exp() * 1.3)
        scored = (normal.log_prob(choice), normal.entropy()) if exact else head.score(mean, choice, 1.3)
        loss = sum(share * (part * weight).sum() for share, part in zip(asked, scored, strict=True) if share)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        found.append((scored, gradients))
    (ours, slopes), (theirs, usual) = found
    torch.testing.assert_close((ours, slopes), (theirs, usual), rtol=1e-10, atol=1e-12)


def test_only_bounded_action_dimensions_are_scaled_to_minus_one_to_one():
    np.testing.assert_array_equal(build(space="box")._net.head.from_actions(np.float32([[-2.0, 10.0]])), [[-1.0, 1.0]])
    np.testing.assert_array_equal(build(space="open")._net.head.from_actions(np.float32([[5.0, 7.0]])), [[5.0, 7.0]])


@pytest.mark.parametrize("space", SPACES)
def test_imitation_loss_is_the_negative_log_likelihood(space):
    policy = shake(build(space=space, chunk=2))
    obs = observe(env_spec(space), 5)
    out = policy.act(obs, noise=uniforms(5, policy))
    scores = policy.imitate(obs, out.actions)
    np.testing.assert_allclose(scores.loss.detach(), -out.logprob.mean(1), atol=1e-4)
    greedy = policy.act(obs, noise=None)
    if SPACES[space].sizes:
        np.testing.assert_allclose(scores.accuracy, (greedy.tokens == out.tokens).mean(1))
        np.testing.assert_array_equal(policy.imitate(obs, greedy.actions).accuracy, 1.0)
        assert scores.error is None
    else:
        assert scores.error is not None
        np.testing.assert_allclose(scores.error, np.abs(greedy.actions - out.actions).mean((1, 2)), atol=1e-5)
        np.testing.assert_allclose(policy.imitate(obs, greedy.actions + 0.25).error, 0.25, atol=1e-5)


@pytest.mark.parametrize("noise", [0.0, float(np.nextafter(np.float32(1), np.float32(0)))])
@pytest.mark.parametrize("space", SPACES)
def test_extreme_noise_gives_finite_actions(space, noise):
    policy = build(space=space)
    out = policy.act(observe(env_spec(space), 2), noise=np.full((2, policy.spec.tokens_per_chunk), noise, np.float32))
    assert np.isfinite(out.actions).all()
    assert np.isfinite(out.logprob).all()
    if SPACES[space].sizes:
        assert (out.tokens < np.asarray(SPACES[space].sizes)).all()
        assert (out.logprob > -50).all()


@pytest.mark.parametrize(("name", "cameras", "value_dim"), [("mlp", 0, 0), ("mlp", 0, 1), ("cnn", 2, 3)])
@pytest.mark.parametrize("space", SPACES)
def test_parameter_count_does_not_import_torch(name, cameras, value_dim, space):
    policy = build(name, env=env_spec(space, cameras=cameras), value_dim=value_dim)
    assert policy.costs.num_parameters == sum(p.numel() for p in policy.module.parameters())
    assert [n for n, _ in policy.module.named_parameters() if n.startswith("value_head")] != [] or value_dim == 0


def test_initial_weights_depend_on_the_seed():
    first, again, other = (build(seed=seed).module.state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["policy.0.weight"], other["policy.0.weight"])


@pytest.mark.parametrize("cameras", [0, 1])
def test_ortho_init_selects_the_initialization(cameras):
    kind, env = ("cnn" if cameras else "mlp"), env_spec("box", cameras=cameras)
    orthogonal, plain = (build(kind, env=env, ortho_init=ortho).module for ortho in (True, False))
    seen = torch.randn(200, plain.shape.features, generator=torch.Generator().manual_seed(0))
    assert orthogonal.outputs(seen).abs().max() < 0.1 < plain.outputs(seen).abs().max()
    again = build(kind, env=env, ortho_init=False).module
    for (name, weight), same in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, same), "from the policy's seed alone"
        layer = plain.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
            bound = layer.weight[0].numel() ** -0.5
            # Of few numbers all may be small by chance.
            least = 0.6 * bound if weight.numel() > 30 else 0.0
            assert least < weight.abs().max() <= bound, f"{name}: uniform, the bias too"
    for layer in orthogonal.modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
            rows = layer.weight.flatten(1)
            product = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
            torch.testing.assert_close(product, product[0, 0] * torch.eye(len(product)), atol=1e-5, rtol=0)
            assert not layer.bias.any()


def test_saved_weights_round_trip(tmp_path):
    policy = shake(build("cnn", env=env_spec("box", cameras=1)))
    policy.save(tmp_path)
    loaded = build("cnn", env=env_spec("box", cameras=1), path=str(tmp_path), seed=8)
    mine, theirs = policy.module.state_dict(), loaded.module.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_older_weight_names_still_load():
    """Fails if layers are numbered without activations, which counted as layers in older versions."""
    names = {name for name in build().module.state_dict() if name.startswith("policy.")}
    assert names == {f"policy.{place}.{part}" for place in (0, 2, 4) for part in ("weight", "bias")}


@pytest.mark.parametrize(("saved", "wanted"), [(0, 1), (1, 0)])
def test_value_head_is_optional(tmp_path, saved, wanted):
    policy = shake(build(value_dim=saved))
    policy.save(tmp_path)
    loaded = build(value_dim=wanted, path=str(tmp_path))
    assert torch.equal(policy.module.state_dict()["policy.0.weight"], loaded.module.state_dict()["policy.0.weight"])


def test_weights_of_another_shape_are_rejected(tmp_path):
    build(space="discrete").save(tmp_path)
    with pytest.raises(CheckpointError, match=r"sizes is \[3\] \(this run needs \[2, 4, 3\]"):
        build(space="multi", path=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"num_actions is 1 \(this run needs 2"):
        build(space="discrete", chunk=2, path=str(tmp_path))


def test_damaged_checkpoints_are_rejected(tmp_path):
    policy = build()
    with pytest.raises(CheckpointError, match=r"config\.json is missing or malformed"):
        policy.load_weights(tmp_path)
    policy.save(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-20])
    with pytest.raises(CheckpointError, match=r"is missing, truncated .*Use another checkpoint"):
        policy.load_weights(tmp_path)
    weights.write_bytes(whole.replace(b"policy.0.weight", b"policy.9.weight"))
    with pytest.raises(
        CheckpointError,
        match=r"unexpected weights: 'policy\.9\.weight'; it lacks 1 of \d+ weights: 'policy\.0\.weight'",
    ):
        policy.load_weights(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["action_kind"] == "discrete"


def test_running_moments_match_all_observations():
    parts = [np.random.default_rng(i).normal(3 * i, 1 + i, (50 + i, 4)).astype(np.float32) for i in range(5)]
    moments = RunningMoments(4)
    for part in parts:
        moments.update(torch.from_numpy(part))
    every = np.concatenate(parts).astype(np.float64)
    np.testing.assert_allclose(moments.mean, every.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.var, every.var(0), rtol=1e-5)
    assert float(moments.count) == len(every)
    normal = moments(torch.from_numpy(parts[1])).numpy()
    np.testing.assert_allclose(normal, (parts[1] - every.mean(0)) / every.std(0), rtol=1e-3, atol=1e-4)


def test_statistics_are_saved_exactly(tmp_path):
    env = env_spec("box")
    policy = build(space="box", env=env)
    assert isinstance(policy, LearnsStatistics)
    before = policy.act(observe(env, 6), noise=None).actions
    for seed in range(3):
        policy.update_statistics(observe(env, 40, seed))
    after = policy.act(observe(env, 6), noise=None)
    assert not np.array_equal(after.actions, before)
    policy.save(tmp_path)
    again = build(space="box", env=env, path=str(tmp_path), seed=99, trainable=False)
    np.testing.assert_array_equal(again.act(observe(env, 6), noise=None).actions, after.actions)
    np.testing.assert_array_equal(again.values(observe(env, 6)), after.value)


def test_state_normalization_is_off_by_default_for_discrete_actions():
    assert not any(name.startswith("states.") for name in build(space="discrete").module.state_dict())


def test_correlated_noise_log_probs_match_samples():
    """Compared with torch's Gaussian with covariance deviation^2 r^|i - j| between actions i and j of a chunk."""
    head, chunk = GaussianHead((-1.0, -2.0), (1.0, 2.0), -0.7, 0.8), 4
    steps = torch.arange(chunk)
    apart = 0.8 ** (steps[:, None] - steps).abs()
    whole = torch.distributions.MultivariateNormal(torch.zeros(chunk), (1.3 * math.exp(-0.7)) ** 2 * apart)
    mean = torch.randn(20_000, chunk, 2, generator=torch.Generator().manual_seed(0))
    choice = head.choose(mean, torch.rand(mean.shape, generator=torch.Generator().manual_seed(1)), 1.3)
    moved = (choice - mean).transpose(1, 2).flatten(0, 1).detach()
    torch.testing.assert_close(moved.T.cov(), whole.covariance_matrix, rtol=0.03, atol=0.01)
    logprob, entropy = head.score(mean, choice, 1.3)
    torch.testing.assert_close(logprob.sum(1).flatten(), whole.log_prob(moved), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy.sum(1).flatten(), whole.entropy().expand(40_000), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("squashed", [False, True])
def test_initial_actions_respect_a_single_bound(squashed):
    """Otherwise, with a bound at 5, the environment clips every sample around 0 to the same action."""
    from embodyrl.policies.soft_actor.head import SquashedHead

    low, high = (5.0, None, None, -2.0), (None, 3.0, None, 4.0)
    head = SquashedHead(low, high) if squashed else GaussianHead(low, high, 0.0)
    edges = np.stack([np.full(4, edge, np.float32) for edge in ((-9, 0, 9) if squashed else (-1, 0, 1))])
    np.testing.assert_allclose(head.to_actions(edges), [[5, 1, -1, -2], [6, 2, 0, 1], [7, 3, 1, 4]], atol=1e-5)
    np.testing.assert_allclose(head.from_actions(head.to_actions(edges[1:2])), edges[1:2], atol=1e-6)


def test_squashed_actions_without_bounds_give_a_warning():
    said = {squashed: build("mlp", "open", squashed=squashed).spec.warnings for squashed in (True, False)}
    assert "action dimensions [0, 1] lack a lower or upper bound" in said[True][0]
    assert said[False] == build("mlp", "box", squashed=True).spec.warnings == ()


def test_keys_for_continuous_actions_give_a_warning_with_discrete_actions():
    said = build("mlp", "discrete", squashed=True, noise_correlation=0.5).spec.warnings
    assert [line.partition(" has no effect")[0] for line in said] == ["model.squashed", "model.noise_correlation"]
    assert build("mlp", "discrete").spec.warnings == build("mlp", "box", noise_correlation=0.5).spec.warnings == ()
