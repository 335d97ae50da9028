"""A frozen OpenVLA-OFT with a residual correction, for each action head."""

from __future__ import annotations

import dataclasses
from contextlib import closing

import numpy as np
import pytest
import torch
from test_oft_continuous import TINY, observe, uniform

from embodyrl.channels.arena import Arena
from embodyrl.commands.collect import collect
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.learners.off_policy.sac_learner import FEATURES, SacLearner
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.plan.memory import plan_memory
from embodyrl.policies.openvla_oft import FACTORY
from embodyrl.policies.openvla_oft.config import normalize
from embodyrl.policies.openvla_oft.residual import ResidualOftPolicy
from embodyrl.policies.soft_actor.protocol import SoftActor
from embodyrl.policies.steering.actor import apply_corrections
from embodyrl.scheduler.start import build_policy_init
from embodyrl.types import BenchmarkSpec
from embodyrl.workers.policy_host import PolicyHost

HEADS = {
    "discrete": {},
    "l1": {"action_head": "l1"},
    "diffusion": {"action_head": "diffusion", "num_diffusion_steps_inference": 3},
}
RUN = (
    *("env=tabletop", "model=openvla_oft_tiny", "launcher=inline", "env.train.total_num_envs=2"),
    *("env.train.max_steps_per_rollout_epoch=8", "model.likelihood=residual", "actor.global_batch_size=8"),
)


@pytest.fixture(params=HEADS)
def build(request, make_policy, env_spec):
    """Build a policy with one of the heads; all have the same frozen weights."""
    env = dataclasses.replace(env_spec, benchmark=BenchmarkSpec(unnorm_key="libero_10"))

    def make(folder=TINY, **keys):
        return make_policy(folder, **{"env": env, "num_action_chunks": 2} | HEADS[request.param] | keys)

    return make


def correct(build, **keys) -> ResidualOftPolicy:
    """Return a policy whose actor is not in its initial state."""
    policy = build(likelihood="residual", **keys)
    assert isinstance(policy, ResidualOftPolicy)
    assert isinstance(policy, SoftActor)
    last, generator = policy._actor.layers[-1], torch.Generator().manual_seed(9)
    torch.nn.init.normal_(last.weight, std=0.1, generator=generator)
    return policy


def half_span(policy) -> np.ndarray:
    """Return the units of an action per correction of 1."""
    bounds = policy._bounds
    return np.where(bounds.mask, (np.asarray(bounds.high) - np.asarray(bounds.low)) / 2, 1.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_new_oft_residual_actor_is_bit_identical_to_the_model(build, precision):
    """Actions during training equal those in evaluation."""
    obs, keys = observe(3), {"precision": precision, "likelihood": "residual"}
    alone = build(precision=precision, trainable=False).act(obs, noise=None).actions
    for trainable in (True, False):
        out = build(trainable=trainable, **keys).act(obs, noise=None)
        assert np.array_equal(out.actions, alone)
        assert not out.tokens.any()
        assert not out.logprob.any()
    assert not np.array_equal(correct(build, precision=precision).act(obs, noise=None).actions, alone)


@pytest.mark.parametrize("repeated", [False, True])
def test_oft_record_contains_the_executed_correction(build, repeated):
    """The model's greedy chunk plus the bounded stored correction; critics and demonstrations use the same sum."""
    policy, obs = correct(build, residual_scale=0.3, residual_repeated=repeated), observe(6)
    out = policy.act(obs, noise=uniform(policy, 6))
    chosen, features = policy.tokens_to_chunks(out.tokens), policy.features(obs)
    assert (chosen.shape, policy.width) == ((6, 14), 7 if repeated else 14)
    assert 0.3 < chosen.abs().max() <= 1
    assert torch.equal(chosen[:, :7], chosen[:, 7:]) is repeated
    moved = 0.3 * chosen.detach().numpy().reshape(6, 2, 7) * half_span(policy)
    theirs = build(trainable=False).act(obs, noise=None).actions
    np.testing.assert_allclose(out.actions, theirs + moved, atol=1e-5)
    seen = apply_corrections(features, chosen, policy._actor.shape).detach().numpy()
    inside = (np.abs(seen) < 1) | ~np.asarray(policy._bounds.mask)
    assert inside.mean() > 0.5
    np.testing.assert_allclose(np.where(inside, normalize(out.actions, policy._bounds), seen), seen, atol=1e-4)
    again = policy.normalize(out.actions, obs).numpy().reshape(6, 2, 7)
    known = inside & (np.asarray(policy._bounds.low) != np.asarray(policy._bounds.high))
    np.testing.assert_allclose(again[known], chosen.detach().numpy().reshape(6, 2, 7)[known], atol=1e-3)


def test_oft_residual_log_prob_matches_a_squashed_gaussian(build):
    """At the start of each action's tokens; compared with torch's transformed distribution."""
    policy, obs = correct(build, temperature=1.0, value_dim=1), observe(4)
    out = policy.act(obs, noise=uniform(policy, 4))
    scores = policy.score(obs, out.tokens)
    np.testing.assert_allclose(scores.logprob.detach().numpy(), out.logprob, atol=1e-5)
    np.testing.assert_allclose(scores.value.detach().numpy(), out.value, atol=1e-6)
    np.testing.assert_allclose(policy.values(obs), out.value, atol=1e-6)
    mean, log_std = policy.module.residual_actor(policy.features(obs)).chunk(2, -1)
    torch_own = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log_std.exp()), [torch.distributions.transforms.TanhTransform(cache_size=1)]
    )
    expected = torch_own.log_prob(policy.tokens_to_chunks(out.tokens).view(4, 2, 7)).sum(2).detach().numpy()
    shares = out.logprob.reshape(4, 2, -1)
    assert shares[..., 0] == pytest.approx(expected, abs=1e-3)
    assert not shares[..., 1:].any()
    assert policy.spec.scored == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_only_the_oft_residual_actor_has_gradients(build, precision):
    policy, obs = correct(build, precision=precision, value_dim=1), observe(2)
    trained = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"residual_actor", "value_head"}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    scores = policy.score(obs, policy.act(obs, noise=uniform(policy, 2)).tokens)
    (scores.logprob.sum() + scores.value.sum()).backward()
    assert all(p.grad is not None and p.grad.any() for p in trained.values())
    assert all(p.grad is None for name, p in policy.module.named_parameters() if name not in trained)
    assert policy.costs.num_trained == sum(p.numel() for p in trained.values())
    assert policy.costs.num_parameters == sum(p.numel() for p in policy.module.parameters())


def test_oft_residual_actor_is_saved_with_the_model(build, tmp_path):
    policy, obs = correct(build), observe(3)
    policy.save(tmp_path / "saved")
    mine = policy.act(obs, noise=None).actions
    for keys in ({"trainable": True}, {"trainable": False}):
        again = build(tmp_path / "saved", likelihood="residual", seed=3, **keys)
        assert np.array_equal(again.act(obs, noise=None).actions, mine)
    with pytest.raises(CheckpointError, match=r"bound is 0\.2 \(this run needs 0\.3"):
        build(tmp_path / "saved", likelihood="residual", residual_scale=0.3)
    with pytest.raises(CheckpointError, match=r"bound is 0\.2 \(this run needs 0\.3"):
        FACTORY.compare(policy._cfg.updated({"residual_scale": 0.3}), policy._env, tmp_path / "saved")
    FACTORY.compare(policy._cfg, policy._env, tmp_path / "saved")
    other = build(likelihood="residual", seed=0)
    other.load_weights(tmp_path / "saved")
    assert np.array_equal(other.act(obs, noise=None).actions, mine)
    model = build(tmp_path / "saved", trainable=False)
    assert "model.likelihood=residual" in model.spec.warnings[0]
    alone = model.act(obs, noise=None).actions
    assert np.array_equal(alone, build(trainable=False).act(obs, noise=None).actions)
    assert not np.array_equal(alone, mine)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("model.is_lora=true",), "likelihood=residual freezes the model including adapters"),
        (("model.likelihood=head",), "OpenVLA-OFT with model.likelihood=residual"),
        (("launcher=local", "actor.fsdp.size=2"), "trains in one process"),
    ],
)
def test_contradictory_residual_keys_are_rejected(words, says, tmp_path):
    words = [*RUN, "algorithm=sac", *words, f"runner.output_dir={tmp_path}"]
    with pytest.raises(ConfigError, match=says):
        build_run_plan(load_config("train", words), training=True)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("model.freeze=[projector.*]",), "model.freeze"),
        (("model.action_head=l1", "model.action_std=0.3"), "model.action_std"),
        (("model.action_head=diffusion", "model.diffusion_eta=0.5"), "model.diffusion_eta"),
        (("model.likelihood=head", "model.residual_scale=0.1"), "model.residual_scale"),
    ],
)
def test_keys_without_effect_give_a_warning(words, key):
    (line,) = load_config("train", [*RUN, "algorithm=sac", *words]).warnings
    assert line.startswith(f"{key} has no effect")


def test_demonstrations_are_stored_as_residual_actions(tmp_path):
    """Critics receive the demonstrated actions; optimizer memory is that of the actor only."""
    demos = tmp_path / "demos"
    view = ("env.init_params.camera_heights=56", "env.init_params.camera_widths=56")
    words = ("env=tabletop", "model=scripted", "launcher=inline", f"collect.out={demos}", "collect.episodes=2", *view)
    words = (*words, "env.init_params.camera_names=[front]", "env.train.total_num_envs=2")
    collect(load_config("collect", [*words, f"runner.output_dir={tmp_path}"]))
    words = [*RUN, "algorithm=rlpd", f"algorithm.demonstrations=[{demos}]", f"runner.output_dir={tmp_path}"]
    run_plan = build_run_plan(load_config("train", words), training=True)
    with (
        closing(Arena.create(run_plan.layout, run_plan.capacity)) as arena,
        closing(PolicyHost(build_policy_init(run_plan, arena, None))) as host,
    ):
        policy, actor = host.policy, host._learner
        assert isinstance(policy, ResidualOftPolicy)
        assert isinstance(actor, SacLearner)
        kept = actor._demonstrations
        assert kept is not None
        seen = apply_corrections(
            torch.tensor(kept[FEATURES]), torch.tensor(kept["action"]), policy._actor.shape
        ).numpy()
        held = actor._trainer.optimization.optimizer.param_groups
        assert sum(p.numel() for group in held for p in group["params"]) == run_plan.policy_costs.num_trained
        assert plan_memory(run_plan).optimizer == 8 * run_plan.policy_costs.num_trained
    # The expert moves within the data's bounds; its gripper is -1 or 1, where the model's is 1 (open) or 0.
    assert np.abs(seen[..., :3]).max() <= 1 + 1e-5
    assert np.abs(seen[..., :3]).max() > 0.5
    assert set(np.unique(seen[..., 6].round(4))) <= {0.0, 1.0}
