"""SFT losses of discrete tokens and L1 regression, and newly initialized heads."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_oft_policy import observe, uniforms

from embodyrl.config.shared import Precision
from embodyrl.errors import CheckpointError
from embodyrl.policies.openvla_oft import OPENVLA
from embodyrl.policies.openvla_oft.config import normalize
from embodyrl.policies.settings import LoraSettings
from embodyrl.types import BenchmarkSpec

TINY = "assets/openvla_oft_tiny"
TASKS = ("pick up the milk and place it in the basket", "open the middle drawer of the cabinet")


@pytest.fixture
def robot(env_spec):
    return dataclasses.replace(env_spec, state_dim=8, benchmark=BenchmarkSpec(unnorm_key="libero_object"))


def targets(rows=4, seed=0):
    return np.random.default_rng(seed).uniform(-0.5, 0.5, (rows, 8, 7)).astype(np.float32)


def test_discrete_loss_is_the_cross_entropy_of_tokens_and_stop(checkpoint, make_policy):
    policy, obs = make_policy(checkpoint), observe()
    out = policy.act(obs, noise=uniforms(4))
    scores = policy.imitate(obs, out.actions)
    # The lowest two ids share one bin center; the higher one stands for both.
    tokens = np.maximum(out.tokens, 31745)
    logits, _ = policy.module(policy._build_inputs(obs), whole_vocabulary=True)
    ids = torch.from_numpy(np.pad(tokens, ((0, 0), (0, 1)), constant_values=2))
    want = torch.stack([F.cross_entropy(row, row_ids) for row, row_ids in zip(logits, ids, strict=True)])
    torch.testing.assert_close(scores.loss, want, rtol=1e-5, atol=0)
    greedy = policy.act(obs, noise=None).tokens
    np.testing.assert_allclose(scores.accuracy, (greedy == tokens).mean(1))


def test_imitation_targets_are_clipped_to_the_statistics(checkpoint, make_policy):
    policy, obs = make_policy(checkpoint), observe()
    far, farther = (policy.imitate(obs, np.full((4, 8, 7), x, np.float32)).loss for x in (99.0, 999.0))
    assert torch.equal(far, farther)


def test_openvla_imitation_uses_teacher_forcing(checkpoint, make_policy):
    policy, obs = make_policy(checkpoint, factory=OPENVLA, num_action_chunks=1), observe()
    out = policy.act(obs, noise=np.random.default_rng(0).random((4, 7), dtype=np.float32))
    tokens = np.maximum(out.tokens, 31745)
    scores = policy.imitate(obs, out.actions)
    logits, _ = policy.module(policy._build_inputs(obs), torch.from_numpy(tokens), whole_vocabulary=True)
    ids = torch.from_numpy(np.pad(tokens, ((0, 0), (0, 1)), constant_values=2))
    torch.testing.assert_close(scores.loss.mean(), F.cross_entropy(logits.transpose(1, 2), ids), rtol=1e-5, atol=0)
    assert scores.loss.requires_grad


def test_l1_loss_is_the_distance_of_normalized_actions(make_policy, robot):
    policy = make_policy(TINY, env=robot, use_proprio=True, action_head="l1")
    obs = observe(state_dim=8, instructions=TASKS)
    scores = policy.imitate(obs, targets())
    got, want = (normalize(actions, policy._bounds) for actions in (policy.act(obs, noise=None).actions, targets()))
    raw = policy.module(policy._build_inputs(obs))[0].detach().numpy()
    np.testing.assert_allclose(scores.loss.detach(), np.abs(raw - want).mean((1, 2)), rtol=1e-5)
    inside = np.abs(raw) < 1
    np.testing.assert_allclose(got[inside], raw[inside], atol=1e-4)
    scores.loss.sum().backward()
    silent = [n for n, p in policy.module.named_parameters() if p.requires_grad
              and not n.endswith(("lm_head.weight", "log_std")) and (p.grad is None or not p.grad.any())]  # fmt: skip
    assert silent == []


@pytest.mark.integration
def test_l1_regression_fits_samples_that_differ_in_image_or_task(make_policy, robot):
    policy = make_policy(TINY, env=robot, use_proprio=True, action_head="l1")
    obs, want = observe(state_dim=8, instructions=TASKS), targets()
    parameters = [p for p in policy.module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    first = policy.imitate(obs, want).loss.mean().item()
    for _ in range(60):
        optimizer.zero_grad()
        policy.imitate(obs, want).loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    assert policy.imitate(obs, want).loss.mean().item() < 0.2 * first


def test_sft_may_add_heads_to_a_checkpoint(checkpoint, make_policy, robot, tmp_path):
    env = dataclasses.replace(robot, benchmark=BenchmarkSpec(unnorm_key="libero_10"))
    config = {"env": env, "use_proprio": True, "action_head": "l1"}
    with pytest.raises(CheckpointError, match="has neither proprio_projector"):
        make_policy(checkpoint, **config)
    a, b = (make_policy(checkpoint, fresh_heads=True, seed=seed, **config) for seed in (0, 1))
    for name, value in a.module.state_dict().items():
        new = name.startswith(("action_head.", "proprio_projector."))
        if not new or value.ndim > 1:
            assert torch.equal(value, b.module.state_dict()[name]) is not new, name
    a.save(tmp_path / "saved")
    assert {"action_head.safetensors", "proprio_projector.safetensors"} <= {
        p.name for p in (tmp_path / "saved").iterdir()
    }
    obs = observe(state_dim=8)
    for again in (make_policy(tmp_path / "saved", seed=2, fresh_heads=fresh, **config) for fresh in (True, False)):
        np.testing.assert_array_equal(again.act(obs, noise=None).actions, a.act(obs, noise=None).actions)


def test_adapters_train_with_a_full_l1_head(checkpoint, make_policy, robot, tmp_path):
    env = dataclasses.replace(robot, benchmark=BenchmarkSpec(unnorm_key="libero_10"))
    config = {"env": env, "use_proprio": True, "action_head": "l1", "is_lora": True, "precision": Precision.bf16}
    config["lora"] = LoraSettings(r=4, lora_alpha=4)
    policy = make_policy(checkpoint, fresh_heads=True, **config)
    trained = {n: p for n, p in policy.module.named_parameters() if p.requires_grad}
    assert {n.partition(".")[0] for n in trained if ".lora_" not in n} == {
        "proprio_projector",
        "action_head",
        "action_scale",
    }
    assert {p.dtype for p in trained.values()} == {torch.float32}
    obs = observe(state_dim=8)
    policy.imitate(obs, targets()).loss.mean().backward()
    of_rl = ("lm_head", "action_scale")
    assert all(p.grad is not None for n, p in trained.items() if not any(part in n for part in of_rl))
    policy.save(tmp_path / "saved")
    again = make_policy(checkpoint, fresh_heads=True, seed=3, **config)
    again.load_weights(tmp_path / "saved")
    np.testing.assert_array_equal(again.act(obs, noise=None).actions, policy.act(obs, noise=None).actions)
