"""DSRL: a frozen flow and a trained policy over its initial noise."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from test_policy import build, folder, noise_for, observe, randomize_weights  # noqa: F401

from embodyrl.algorithms.off_policy.replay import Frames
from embodyrl.channels.arena import Arena, read_observation
from embodyrl.channels.layout import Record
from embodyrl.channels.messages import UpdateRequest
from embodyrl.errors import ConfigError
from embodyrl.learners.off_policy.sac_learner import FEATURES, SacLearner
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.policies.flow.likelihood import flow_sde
from embodyrl.policies.flow.steering import SteeredFlowPolicy
from embodyrl.policies.soft_actor.protocol import SoftActor
from embodyrl.policies.vla.sampling import STEP, get_seeds, sample_normals
from embodyrl.scheduler.start import build_policy_init
from embodyrl.types import FloatArray
from embodyrl.workers.policy_host import PolicyHost

RUN = ("model=flow_small", "algorithm=sac", "model.likelihood=dsrl", "launcher=inline")


def steer(folder: Path, **keys: object) -> SteeredFlowPolicy:  # noqa: F811
    policy = build(folder, likelihood="dsrl", **keys)
    assert isinstance(policy, SteeredFlowPolicy)
    assert isinstance(policy, SoftActor)
    randomize_weights(policy)
    return policy


def flow_from(policy: SteeredFlowPolicy, start: torch.Tensor) -> FloatArray:
    """Return the actions of the same flow from given noise, step by step."""
    obs, network, steps = observe(6), policy.module.network, 4
    with torch.no_grad():
        prefix, x = network.encode_prefix(obs), start
        for k in range(steps):
            v, _ = network.velocity(prefix, x, torch.full((6,), 1 - k / steps))
            x = x - v / steps
    return network.to_actions(x.numpy(), obs)


@pytest.mark.parametrize("repeated", [False, True])
def test_dsrl_action_is_the_initial_noise(folder, repeated):  # noqa: F811
    policy = steer(folder, noise_repeated=repeated, noise_bound=2.0)
    out = policy.act(observe(6), noise=noise_for(policy, 6))
    chosen = policy.tokens_to_chunks(out.tokens)
    assert chosen.shape == (6, policy.width) == (6, 4 if repeated else 12)
    assert chosen.abs().max() < 1
    start = 2.0 * (chosen[:, None].expand(-1, 3, -1) if repeated else chosen.unflatten(1, (3, 4)))
    assert np.abs(flow_from(policy, start) - out.actions).max() < 1e-5


def test_dsrl_noise_is_denoised_by_the_sde(folder):  # noqa: F811
    """From the chosen noise with the first steps of the seed's streams; the greedy chunk is still that of the ODE."""
    policy, plain = (steer(folder, noise_repeated=True, steered_noise=level) for level in (0.7, 0.0))
    noise, obs = noise_for(policy, 6), observe(6)
    out, certain = (p.act(obs, noise=noise, temperature=0.6) for p in (policy, plain))
    assert np.array_equal(out.tokens, certain.tokens)
    assert np.array_equal(out.logprob, certain.logprob)
    assert np.array_equal(*(p.act(obs, noise=None).actions for p in (policy, plain)))
    network, x = policy.module.network, 1.5 * policy.tokens_to_chunks(out.tokens)[:, None].expand(-1, 3, -1)
    with torch.no_grad():
        prefix = network.encode_prefix(obs)
        for k in range(4):
            t, end = torch.tensor(1 - k / 4), torch.tensor(0.75 - k / 4)
            step = flow_sde(x, network.velocity(prefix, x, t.expand(6))[0], t, end, torch.tensor(0.7))
            x = step.mean + 0.6 * step.std * sample_normals(get_seeds(noise), STEP + k, (3, 4), torch.device("cpu"))
    assert np.abs(network.to_actions(x.numpy(), obs) - out.actions).max() < 1e-5
    assert np.abs(out.actions - certain.actions).max() > 0.1


def test_untrained_dsrl_actor_matches_the_flow(folder):  # noqa: F811
    """With zero weights in the last layer the mean is the center of the noise range."""
    policy = steer(folder)
    last = policy.module.noise_actor.layers[-1]
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.zeros_(last.bias)
    alone = build(folder)
    alone.module.network.load_state_dict(policy.module.network.state_dict())
    mine, theirs = (p.act(observe(6), noise=None).actions for p in (policy, alone))
    assert np.array_equal(mine, theirs)


def test_dsrl_logprob_matches_a_squashed_gaussian(folder):  # noqa: F811
    """Joint over all chosen numbers, at the first action; compared with torch's transformed distribution."""
    policy = steer(folder)
    obs = observe(6)
    out = policy.act(obs, noise=noise_for(policy, 6))
    mean, log_std = policy.module.noise_actor(policy.features(obs))[:, 0].chunk(2, -1)
    torch_own = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log_std.exp()), [torch.distributions.transforms.TanhTransform(cache_size=1)]
    )
    expected = torch_own.log_prob(policy.tokens_to_chunks(out.tokens)).sum(1).detach().numpy()
    assert out.logprob[:, 0] == pytest.approx(expected, abs=1e-3)
    assert not out.logprob[:, 1:].any()


def test_only_the_dsrl_actor_has_gradients(folder):  # noqa: F811
    policy = steer(folder, value_dim=1)
    trained = {name.split(".")[0] for name, p in policy.module.named_parameters() if p.requires_grad}
    assert trained == {"noise_actor", "value_head"}
    policy.score(observe(2), policy.act(observe(2), noise=noise_for(policy, 2)).tokens).logprob.sum().backward()
    assert all(p.grad is None for p in policy.module.network.parameters())
    assert policy.module.noise_actor.layers[0].weight.grad.abs().sum() > 0


def test_dsrl_actor_is_saved_with_the_flow(folder, tmp_path):  # noqa: F811
    policy, other = steer(folder), build(folder, likelihood="dsrl", seed=3)
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved)
    other.load_weights(saved)
    assert np.array_equal(*(p.act(observe(6), noise=None).actions for p in (policy, other)))


def test_demonstrations_are_rejected_for_dsrl(folder):  # noqa: F811
    policy = steer(folder)
    with pytest.raises(ConfigError, match="outputs noise, not actions"):
        policy.normalize(np.zeros((2, 3, 4), np.float32), observe(2))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("algorithm.demonstrations=[assets]",), "has actions, but model.likelihood=dsrl selects noise"),
        (("model.likelihood=flow_sde",), "or a flow policy, ACT or Diffusion Policy with model.likelihood=dsrl"),
    ],
)
def test_contradictory_dsrl_keys_are_rejected(words, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        build_run_plan(load_config("train", [*RUN, *words, f"runner.output_dir={tmp_path}"]), training=True)


def test_dsrl_update_uses_stored_features(tmp_path):
    """The buffer contains no images; the best noise is at a bound, which the actor reaches."""
    rates = ("actor.optim.lr=1e-3", "actor.optim.value_lr=3e-3", "algorithm.alpha_init=0.01")
    words = [*RUN, *rates, "actor.global_batch_size=32", "model.noise_repeated=true", f"runner.output_dir={tmp_path}"]
    run_plan = build_run_plan(load_config("train", words), training=True)
    with (
        closing(Arena.create(run_plan.layout, run_plan.capacity)) as arena,
        closing(PolicyHost(build_policy_init(run_plan, arena, None))) as host,
    ):
        actor = host._learner
        assert isinstance(actor, SacLearner)
        frozen = {name: p.clone() for name, p in host.policy.module.network.named_parameters()}
        torch.manual_seed(0)
        count, width = 512, actor._policy.width
        tried = torch.rand(count, width) * 2 - 1
        actor._replay.add(
            Frames(
                seen={FEATURES: np.full((count, host.policy.module.network.hidden_width), 0.1, np.float32)},
                action=tried.numpy(),
                reward=-tried[:, 0].numpy(),
                acted=np.ones(count, np.bool_),
                terminated=np.ones(count, np.bool_),
                episode=np.arange(count),
            )
        )
        for step in range(60):
            rows = np.random.default_rng(step).integers(0, count, 32)
            metrics = actor._step([actor._replay.transitions(rows)], np.arange(2), step)
        assert math.isfinite(metrics["loss"])
        features = torch.full((1, host.policy.module.network.hidden_width), 0.1)
        mean, _ = host.policy.module.noise_actor.head.get_mean_and_log_std(host.policy.module.noise_actor(features))
        assert mean.tanh()[0, 0, 0] < -0.7
        assert all(torch.equal(p, frozen[name]) for name, p in host.policy.module.network.named_parameters())


def test_temperature_widens_the_dsrl_distribution(folder):  # noqa: F811
    """The sample before squashing is mean + temperature * deviation * noise."""
    policy = steer(folder)
    noise, chosen = noise_for(policy, 6), []
    for temperature in (0.5, 1.0, 1.5):
        out = policy.act(observe(6), noise=noise, temperature=temperature)
        chosen.append(policy.tokens_to_chunks(out.tokens).double().atanh())
    torch.testing.assert_close(chosen[2] - chosen[1], chosen[1] - chosen[0], rtol=1e-3, atol=1e-4)
    assert float((chosen[1] - chosen[0]).abs().mean()) > 0.01


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_dsrl_logprob_includes_the_temperature(folder, temperature):  # noqa: F811
    policy = steer(folder)
    out = policy.act(observe(6), noise=noise_for(policy, 6), temperature=temperature)
    mean, log_std = policy.module.noise_actor(policy.features(observe(6)))[:, 0].chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.exp() * temperature)
    tangent = torch.distributions.transforms.TanhTransform(cache_size=1)
    chosen = torch.distributions.TransformedDistribution(normal, [tangent])
    expected = chosen.log_prob(policy.tokens_to_chunks(out.tokens)).sum(1).detach().numpy()
    assert out.logprob[:, 0] == pytest.approx(expected, abs=1e-3)


def test_stored_features_match_their_observation(tmp_path):
    """Five observations, processed two at a time."""
    words = [*RUN, "actor.global_batch_size=2", f"runner.output_dir={tmp_path}"]
    run_plan = build_run_plan(load_config("train", words), training=True)
    with (
        closing(Arena.create(run_plan.layout, run_plan.capacity)) as arena,
        closing(PolicyHost(build_policy_init(run_plan, arena, None))) as host,
    ):
        record_refs = arena.allocate_all(5)
        with arena.write_all(record_refs) as records:
            shape = arena[Record.images][records].shape
            arena[Record.images][records] = np.random.default_rng(0).integers(0, 256, shape)
            for field in (Record.observed_state, Record.tokens, Record.terminated, Record.advantage):
                arena[field][records] = 0
            arena[Record.valid][records], arena[Record.terminated][records[-1], 0] = True, True
        actor = host._learner
        assert isinstance(actor, SacLearner)
        actor._store(UpdateRequest(step=0, record_refs=record_refs, episode=[0] * 5))
        expected = host.policy.features(read_observation(arena, records)).numpy()
        np.testing.assert_allclose(actor._replay[FEATURES][:5], expected, atol=1e-5)
        assert np.abs(np.diff(expected, axis=0)).max(axis=1).min() > 1e-4
