"""The residual policy: a frozen flow and a trained bounded correction."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from test_policy import ENV, build, folder, noise_for, observe, randomize_weights  # noqa: F401

from embodyrl.algorithms.off_policy.replay import Frames
from embodyrl.channels.arena import Arena
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.learners.off_policy.sac_learner import FEATURES, SacLearner
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.policies.flow.small import FACTORY
from embodyrl.policies.flow.steering import SteeredFlowPolicy
from embodyrl.policies.soft_actor.critics import Critics
from embodyrl.policies.soft_actor.protocol import SoftActor
from embodyrl.scheduler.start import build_policy_init
from embodyrl.workers.policy_host import PolicyHost

RUN = ("model=flow_small", "algorithm=sac", "model.likelihood=residual", "launcher=inline")
HALF_SPAN = np.array([2.0, 0.5, 0.0, 1.0], np.float32)
"""Units of an action per correction of 1, from the bounds of the data (the gripper's are -1 and 1)."""


def correct(folder: Path, **keys: object) -> SteeredFlowPolicy:  # noqa: F811
    """Return a policy whose actor is not in its initial state."""
    policy = build(folder, likelihood="residual", **keys)
    assert isinstance(policy, SteeredFlowPolicy)
    assert isinstance(policy, SoftActor)
    randomize_weights(policy)
    return policy


@pytest.mark.parametrize("start", ["zero", "random"])
def test_new_residual_actor_is_bit_identical_to_the_flow(folder, start):  # noqa: F811
    policy, alone = (build(folder, greedy_start=start, **way) for way in ({"likelihood": "residual"}, {}))
    mine, theirs = (p.act(observe(6), noise=None).actions for p in (policy, alone))
    assert np.array_equal(mine, theirs)
    assert np.abs(correct(folder, greedy_start=start).act(observe(6), noise=None).actions - theirs).max() > 1e-3


@pytest.mark.parametrize("start", ["zero", "random"])
@pytest.mark.parametrize("repeated", [False, True])
def test_record_contains_the_executed_correction(folder, start, repeated):  # noqa: F811
    """The flow's greedy chunk plus the stored correction times its scale; also through the critics' features."""
    policy = correct(folder, residual_scale=0.3, greedy_start=start, residual_repeated=repeated)
    alone = build(folder, greedy_start=start)
    alone.module.network.load_state_dict(policy.module.network.state_dict())
    obs = observe(6)
    out = policy.act(obs, noise=noise_for(policy, 6))
    chosen, proposed = policy.tokens_to_chunks(out.tokens), policy.features(obs)[:, -12:]
    assert (chosen.shape, policy.width) == ((6, 12), 4 if repeated else 12)
    assert not repeated or torch.equal(chosen[:, :4], chosen[:, 8:])
    assert 0.3 < chosen.abs().max() < 1
    theirs = alone.act(obs, noise=None).actions
    moved = HALF_SPAN * 0.3 * chosen.detach().numpy().reshape(6, -1, 4)
    np.testing.assert_allclose(out.actions, theirs + moved, atol=1e-5)
    executed = (proposed.view(6, 3, 4) + 0.3 * chosen.view(6, -1, 4)).detach().numpy()
    np.testing.assert_allclose(policy._scale.to_actions(executed, obs), out.actions, atol=1e-5)


def test_residual_features_contain_the_first_denoising_step(folder):  # noqa: F811
    policy, obs = correct(folder), observe(6)
    network, middle = policy.module.network, torch.zeros(6, 3, 4)
    with torch.no_grad():
        rows = network.velocity(network.encode_prefix(obs), middle, torch.ones(6))[1]
        features = policy.features(obs)
    torch.testing.assert_close(features[:, :-12], rows.mean(1))


def test_residual_logprob_matches_the_correction(folder):  # noqa: F811
    """At the start of the action's tokens; compared with torch's transformed distribution."""
    policy = correct(folder)
    obs = observe(6)
    out = policy.act(obs, noise=noise_for(policy, 6))
    mean, log_std = policy.module.residual_actor(policy.features(obs)).chunk(2, -1)
    torch_own = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log_std.exp()), [torch.distributions.transforms.TanhTransform(cache_size=1)]
    )
    expected = torch_own.log_prob(policy.tokens_to_chunks(out.tokens).view(6, 3, 4)).sum(2).detach().numpy()
    shares = out.logprob.reshape(6, 3, -1)
    assert shares[..., 0] == pytest.approx(expected, abs=1e-3)
    assert not shares[..., 1:].any()


@pytest.mark.parametrize("likelihood", ["residual", "dsrl"])
def test_sampled_and_recomputed_log_probs_agree_at_another_temperature(folder, likelihood):  # noqa: F811
    policy = build(folder, likelihood=likelihood, temperature=0.7)
    randomize_weights(policy)
    out = policy.act(observe(6), noise=noise_for(policy, 6))
    again = policy.score(observe(6), out.tokens).logprob.detach().numpy()
    np.testing.assert_allclose(again, out.logprob, rtol=1e-4, atol=1e-4)
    other = policy.act(observe(6), noise=noise_for(policy, 6), temperature=1.0)
    assert np.abs(other.logprob - out.logprob).max() > 0.1


def test_only_the_residual_actor_has_gradients(folder):  # noqa: F811
    policy = correct(folder, value_dim=1)
    trained = {name.split(".")[0] for name, p in policy.module.named_parameters() if p.requires_grad}
    assert trained == {"residual_actor", "value_head"}
    policy.score(observe(2), policy.act(observe(2), noise=noise_for(policy, 2)).tokens).logprob.sum().backward()
    assert all(p.grad is None for p in policy.module.network.parameters())
    assert all(p.grad is not None and p.grad.any() for p in policy.module.residual_actor.parameters())
    assert policy.costs.num_trained == sum(p.numel() for p in policy.module.residual_actor.parameters())


def test_critics_receive_executed_actions(folder):  # noqa: F811
    """In addition to features and proposal; the same networks with the sum as input return the same values."""
    policy = correct(folder, residual_scale=0.5)
    features, correction = policy.features(observe(6)), torch.rand(6, 12) * 2 - 1
    plain = Critics(2, (features.shape[1] + 12, 256, 256), torch.Generator(), layer_norm=True)
    critics = policy.build_critics(2, 3, layer_norm=True)
    plain.load_state_dict(critics.state_dict())
    executed = features[:, -12:] + 0.5 * correction
    assert torch.equal(critics(features, correction), plain(features, executed))
    assert not torch.allclose(plain(features, correction), plain(features, executed), atol=1e-3)


def test_residual_actor_is_saved_with_the_flow(folder, tmp_path):  # noqa: F811
    policy, saved = correct(folder), tmp_path / "saved"
    saved.mkdir()
    policy.save(saved)
    obs = observe(6)
    mine = policy.act(obs, noise=None).actions
    assert np.array_equal(build(saved, likelihood="residual", seed=3).act(obs, noise=None).actions, mine)
    for wrong, says in (({"residual_scale": 0.3}, "bound is 0.2"), ({"residual_repeated": True}, "rows is 3")):
        with pytest.raises(CheckpointError, match=says):
            build(saved, likelihood="residual", **wrong)
        with pytest.raises(CheckpointError, match=says):
            FACTORY.compare(policy._cfg.updated(wrong), ENV, saved)
    flow = build(saved, seed=3)
    assert "trained with model.likelihood=residual" in flow.spec.warnings[0]
    alone = flow.act(obs, noise=None).actions
    steered = build(saved, likelihood="dsrl", noise_bound=1e-6)
    np.testing.assert_allclose(steered.act(obs, noise=None).actions, alone, atol=1e-4)
    assert "trained with model.likelihood=residual" in steered.spec.warnings[0]
    assert np.abs(alone - mine).max() > 1e-3


@pytest.mark.parametrize("damaged", ['{"bound":', "[]"])
def test_damaged_shape_of_an_actor_is_rejected(folder, tmp_path, damaged):  # noqa: F811
    policy, saved = correct(folder), tmp_path / "saved"
    saved.mkdir()
    policy.save(saved)
    (saved / "steering.json").write_text(damaged)
    with pytest.raises(CheckpointError, match=r"steering.json is missing or malformed"):
        build(saved, likelihood="residual")
    with pytest.raises(CheckpointError, match=r"steering.json is missing or malformed"):
        FACTORY.compare(policy._cfg, ENV, saved)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("model.noise_bound=2",), "model.noise_bound"),
        (("model.steered_noise=0.5",), "model.steered_noise"),
        (("model.likelihood=dsrl", "model.residual_scale=0.1"), "model.residual_scale"),
        (("model.joint_logprob=mean",), "model.joint_logprob"),
        (("algorithm=grpo", "model.likelihood=fpo", "model.joint_logprob=mean"), "model.joint_logprob"),
        (
            ("algorithm=grpo", "model.likelihood=flow_sde", "model.stochastic_steps=one", "model.joint_logprob=mean"),
            "model.joint_logprob",
        ),
        (
            ("algorithm=grpo", "model.likelihood=flow_sde", "model.stochastic_steps=all", "model.ignore_last=true"),
            "model.ignore_last",
        ),
        (("model.imitated_pairs=9",), "model.imitated_pairs"),
        (("model.imitated_time=9",), "model.imitated_time"),
        (("model.value_from=expert",), "model.value_from"),
    ],
)
def test_keys_without_effect_give_a_warning(words, says):
    (line,) = load_config("train", [*RUN, *words]).warnings
    assert line.startswith(f"{says} has no effect")


def test_sac_needs_a_frozen_flow(tmp_path):
    words = [*RUN, "model.likelihood=flow_sde", f"runner.output_dir={tmp_path}"]
    with pytest.raises(ConfigError, match="dsrl or residual"):
        build_run_plan(load_config("train", words), training=True)


def test_residual_updates_keep_the_flow_frozen(tmp_path):
    """The reward is highest for a first executed number of 0.3: corrections increase if the proposal is far below."""
    rates = ("actor.optim.lr=1e-3", "actor.optim.value_lr=3e-3", "algorithm.alpha_init=0.01")
    words = [*RUN, *rates, "model.residual_scale=0.5", f"runner.output_dir={tmp_path}"]
    run_plan = build_run_plan(load_config("train", words), training=True)
    with (
        closing(Arena.create(run_plan.layout, run_plan.capacity)) as arena,
        closing(PolicyHost(build_policy_init(run_plan, arena, None))) as host,
    ):
        actor, module = host._learner, host.policy.module
        assert isinstance(actor, SacLearner)
        frozen = {name: p.clone() for name, p in module.network.state_dict().items()}
        torch.manual_seed(0)
        count, width, known = 512, actor._policy.width, run_plan.policy_costs.steering_features
        tried, seen = torch.rand(count, width) * 2 - 1, torch.zeros(count, known)
        seen[:, -width] = torch.rand(count) - 0.2  # -0.2 to 0.8: within reach of 0.3
        actor._replay.add(
            Frames(
                seen={FEATURES: seen.numpy()},
                action=tried.numpy(),
                reward=-(seen[:, -width] + 0.5 * tried[:, 0] - 0.3).abs().numpy(),
                acted=np.ones(count, np.bool_),
                terminated=np.ones(count, np.bool_),
                episode=np.arange(count),
            )
        )
        for step in range(100):
            rows = np.random.default_rng(step).integers(0, count, 64)
            actor._step([actor._replay.transitions(rows)], np.arange(2), step)
        asked = torch.zeros(2, known)
        asked[:, -width] = torch.tensor([-0.2, 0.8])
        mean, _ = module.residual_actor.head.get_mean_and_log_std(module.residual_actor(asked))
        low, high = mean[:, 0, 0].tanh().tolist()
        assert low > 0.4
        assert high < -0.4
        assert all(torch.equal(p, frozen[name]) for name, p in module.network.state_dict().items())
