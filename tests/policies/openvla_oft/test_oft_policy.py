import dataclasses
import warnings

import numpy as np
import pytest
import torch

from embodyrl.config.shared import Precision
from embodyrl.policies.tensors import compute_integer_sums, sample_inverse_cdf
from embodyrl.types import BenchmarkSpec, Observation

pytestmark = pytest.mark.filterwarnings("error")
TINY = "assets/openvla_oft_tiny"


def observe(seed=0, rows=4, cameras=1, state_dim=0, instructions=("pick up the black bowl", "put the")):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (rows, cameras, 64, 64, 3), dtype=np.uint8)
    images.flags.writeable = False  # as the arena's views
    return Observation(
        images=images,
        state=rng.normal(size=(rows, state_dim)).astype(np.float32),
        instructions=tuple(instructions[i % len(instructions)] for i in range(rows)),
    )


def uniforms(rows, seed=0):
    return np.random.default_rng(seed).random((rows, 56), dtype=np.float32)


@pytest.mark.parametrize("rotation", [0, 180])
def test_read_only_inputs_are_accepted(checkpoint, make_policy, env_spec, rotation):
    policy = make_policy(
        checkpoint,
        env=dataclasses.replace(env_spec, cameras=dataclasses.replace(env_spec.cameras, rotation_deg=rotation)),
    )
    noise = uniforms(4)
    noise.flags.writeable = False
    with warnings.catch_warnings():  # torch warns where it is handed memory that it must not write
        warnings.simplefilter("error")
        out = policy.act(observe(), noise=noise)
        out.tokens.flags.writeable = False
        scores = policy.score(observe(), out.tokens)
    np.testing.assert_allclose(scores.logprob.detach().numpy(), out.logprob, atol=1e-5)


def test_outputs_have_the_declared_shapes(checkpoint, make_policy):
    policy = make_policy(checkpoint, value_dim=8)
    out = policy.act(observe(), noise=uniforms(4))
    assert out.actions.shape == (4, 8, 7)
    assert out.actions.dtype == np.float32
    assert out.tokens.shape == out.logprob.shape == (4, 56)
    assert out.tokens.dtype == np.int64
    assert out.value.shape == (4, 8)
    assert out.value.dtype == out.logprob.dtype == np.float32
    assert ((out.tokens >= 31744) & (out.tokens < 32000)).all()
    np.testing.assert_array_equal(policy.values(observe()), out.value)
    assert make_policy(checkpoint).act(observe(), noise=None).value.shape == (4, 0)
    assert sum(p.numel() for p in policy.module.parameters()) == policy.costs.num_parameters


def test_actions_are_in_the_units_of_the_statistics(checkpoint, make_policy):
    actions = make_policy(checkpoint).act(observe(), noise=uniforms(4)).actions
    # Bounds of libero_10_no_noops; the gripper is a bin center and never exactly 0.5.
    assert np.all(actions[..., 0] >= -0.6349)
    assert np.all(actions[..., 0] <= 0.7715)
    assert np.abs(actions[..., 6]).max() <= 255 / 256
    assert np.abs(actions[..., 6]).max() > 0.2
    assert not np.any(actions[..., 6] == 0.5)


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
@pytest.mark.parametrize("trainable", [True, False])
def test_oft_sampled_and_recomputed_log_probs_agree(checkpoint, make_policy, precision, trainable):
    policy = make_policy(checkpoint, value_dim=1, precision=precision, trainable=trainable)
    for noise in (uniforms(4), None):
        out = policy.act(observe(), noise=noise)
        scores = policy.score(observe(), out.tokens)
        assert scores.logprob.dtype == scores.entropy.dtype == scores.value.dtype == torch.float32
        assert scores.logprob.requires_grad is trainable
        np.testing.assert_allclose(scores.logprob.detach().numpy(), out.logprob, atol=1e-6)
        np.testing.assert_allclose(scores.value.detach().numpy(), out.value, atol=1e-6)


def test_log_prob_includes_the_temperature_except_for_greedy(checkpoint, make_policy):
    hot, cold = make_policy(checkpoint, temperature=1.6), make_policy(checkpoint, temperature=0.5)
    hot_out, cold_out = (p.act(observe(), noise=None) for p in (hot, cold))
    np.testing.assert_array_equal(hot_out.tokens, cold_out.tokens)
    assert np.all(hot_out.logprob < cold_out.logprob + 1e-6)
    assert hot_out.logprob.mean() < cold_out.logprob.mean() - 0.1


def test_rows_are_batch_independent(checkpoint, make_policy):
    policy = make_policy(checkpoint, value_dim=1)
    first, other = observe(0), observe(1, instructions=("put the",))
    images = other.images.copy()
    images[2] = first.images[2]
    texts = (*other.instructions[:2], first.instructions[2], other.instructions[3])
    mixed = dataclasses.replace(other, images=images, instructions=texts)
    noise, mixed_noise = uniforms(4, 0), uniforms(4, 1)
    mixed_noise[2] = noise[2]
    a, b = policy.act(first, noise=noise), policy.act(mixed, noise=mixed_noise)
    for field in ("actions", "tokens", "logprob", "value"):
        np.testing.assert_array_equal(getattr(a, field)[2], getattr(b, field)[2])
        assert not np.array_equal(getattr(a, field)[3], getattr(b, field)[3])


def test_actions_depend_on_instruction_and_image(checkpoint, make_policy):
    policy = make_policy(checkpoint)
    base = observe(rows=1)
    other_text = dataclasses.replace(base, instructions=("put the",))
    other_image = dataclasses.replace(base, images=base.images[:, :, ::-1].copy())
    logprob = policy.act(base, noise=None).logprob
    for changed in (other_text, other_image):
        assert np.abs(policy.act(changed, noise=None).logprob - logprob).max() > 1e-3


def test_padding_does_not_change_a_row(checkpoint, make_policy, env_spec):
    """A policy that has only the short task runs it without padding."""
    short = dataclasses.replace(env_spec, tasks=("put the",), states_per_task=(1,))
    obs = observe(rows=2, instructions=("put the",))
    padded, tight = make_policy(checkpoint), make_policy(checkpoint, env=short)
    a, b = (p.act(obs, noise=None) for p in (padded, tight))
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.logprob, b.logprob, atol=1e-4)


def test_policy_reads_only_the_configured_cameras(checkpoint, make_policy, env_spec):
    two = dataclasses.replace(env_spec, cameras=dataclasses.replace(env_spec.cameras, names=("agentview", "wrist")))
    obs = observe(cameras=2)
    blind = dataclasses.replace(obs, images=obs.images.copy())
    blind.images[:, 1] = 0
    for count, same in ((1, True), (2, False)):
        policy = make_policy(checkpoint, env=two, num_images_in_input=count)
        a, b = (policy.act(o, noise=None).logprob for o in (obs, blind))
        assert np.array_equal(a, b) is same


def test_sampled_frequencies_match_the_softmax():
    count = 20_000
    scaled = torch.randn(1, 1, 256, generator=torch.Generator().manual_seed(0)) * 2
    # An even grid of uniforms hits every bin to within one grid step.
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = sample_inverse_cdf(scaled.expand(1, count, 256), grid[None])
    frequency = torch.bincount(drawn[0], minlength=256) / count
    torch.testing.assert_close(frequency, scaled[0, 0].softmax(-1), atol=1.01 / count, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_integer_cumulative_sums_match_float_sums(dtype):
    probability = (torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)) * 2).to(dtype).softmax(-1)
    probability[:, 100:200] = 0
    sums = compute_integer_sums(probability)
    assert sums.dtype == dtype
    torch.testing.assert_close(sums, probability.cumsum(-1), rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12)
    assert (sums[:, 100:200] == sums[:, 99:100]).all()


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("pipeline", ["rlinf", "official"])
def test_training_and_rollout_use_the_same_pixels(checkpoint, make_policy, pipeline, precision):
    policy = make_policy(checkpoint, image_pipeline=pipeline, precision=precision)
    seen = []
    policy.module.vision_backbone.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    out = policy.act(observe(), noise=uniforms(4))
    policy.score(observe(), out.tokens)
    policy.imitate(observe(), out.actions)
    assert len(seen) == 3
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_sampling_at_the_bounds_of_the_noise_interval_is_valid():
    scaled = torch.full((1, 2, 256), -float("inf"))
    scaled[..., 7] = 0.0
    noise = torch.tensor([[0.0, np.nextafter(np.float32(1), np.float32(0))]])
    assert sample_inverse_cdf(scaled, noise).tolist() == [[7, 7]]


def test_gradients_reach_both_vision_encoders_and_the_value_head(make_policy):
    policy = make_policy(TINY, value_dim=1)
    obs = observe(instructions=("pick up the milk and place it in the basket",))
    scores = policy.score(obs, policy.act(obs, noise=uniforms(4)).tokens)
    (scores.logprob.sum() + scores.value.sum()).backward()
    norms = {n: float(p.grad.norm()) for n, p in policy.module.named_parameters() if p.requires_grad}
    assert all(np.isfinite(list(norms.values())))
    silent = [name for name, norm in norms.items() if norm == 0.0]
    # Zero placeholders have zero queries in the first layer, but prompt and patches do not.
    assert silent == []


def test_tiny_preset_action_distribution_starts_near_uniform(make_policy):
    obs = observe(instructions=("pick up the milk and place it in the basket",))
    first, again, other = (make_policy(TINY, seed=seed, temperature=1.0) for seed in (0, 0, 1))
    entropy = first.score(obs, first.act(obs, noise=None).tokens).entropy
    assert entropy.min() > np.log(256) - 1.0
    a, b, c = (p.act(obs, noise=None).logprob for p in (first, again, other))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)


def test_tiny_preset_learns_to_use_images_and_instructions(make_policy):
    """Four samples with different targets are fitted in 30 steps, which requires images and instructions."""
    policy = make_policy(TINY, temperature=1.0)
    tasks = ("pick up the milk and place it in the basket", "open the middle drawer of the cabinet")
    base = observe(instructions=tasks)
    images = base.images.copy()
    images[1], images[3] = images[0], images[2]
    obs = dataclasses.replace(base, images=images)
    targets = np.random.default_rng(5).integers(704, 960, (4, 56))
    optimizer = torch.optim.AdamW([p for p in policy.module.parameters() if p.requires_grad], lr=2e-3)
    for _ in range(30):
        loss = -policy.score(obs, targets).logprob.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.module.parameters(), 1.0)
        optimizer.step()
    assert (policy.act(obs, noise=None).tokens == targets).mean() > 0.9


def test_image_pipeline_setting_is_used(checkpoint, make_policy):
    a, b = (make_policy(checkpoint, image_pipeline=name).act(observe(), noise=None) for name in ("rlinf", "official"))
    assert np.abs(a.logprob - b.logprob).max() > 1e-3


def test_tiny_preset_uses_both_cameras_and_the_state(make_policy, env_spec, tmp_path):
    cameras = ("agentview", "robot0_eye_in_hand")
    env = dataclasses.replace(
        env_spec,
        cameras=dataclasses.replace(env_spec.cameras, names=cameras),
        state_dim=8,
        benchmark=BenchmarkSpec(unnorm_key="libero_object"),
    )
    options = {"env": env, "num_images_in_input": 2, "use_proprio": True, "value_dim": 1}
    policy = make_policy(TINY, **options)
    assert policy.spec.inputs.state
    base = observe(cameras=2, state_dim=8)
    out = policy.act(base, noise=None)
    wrist = base.images.copy()
    wrist[:, 1] = 255 - wrist[:, 1]
    for changed in (dataclasses.replace(base, images=wrist), dataclasses.replace(base, state=base.state + 0.1)):
        assert np.abs(policy.act(changed, noise=None).value - out.value).max() > 1e-4
    np.testing.assert_allclose(policy.score(base, out.tokens).logprob.detach().numpy(), out.logprob, atol=1e-5)
    policy.save(tmp_path / "saved")
    again = make_policy(tmp_path / "saved", seed=5, **options).act(base, noise=None)
    np.testing.assert_array_equal(again.logprob, out.logprob)
    assert sum(p.numel() for p in policy.module.parameters()) == policy.costs.num_parameters


def test_tiny_preset_logprobs_are_batch_independent(make_policy, env_spec):
    """Rows of different prompt lengths together, alone and in reverse order; while acting and while training."""
    cameras = ("agentview", "robot0_eye_in_hand")
    env = dataclasses.replace(
        env_spec,
        cameras=dataclasses.replace(env_spec.cameras, names=cameras),
        state_dim=8,
        benchmark=BenchmarkSpec(unnorm_key="libero_object"),
    )
    policy = make_policy("assets/openvla_oft_tiny_soup", env=env, num_images_in_input=2, use_proprio=True)
    obs = observe(rows=4, cameras=2, state_dim=8)
    out = policy.act(obs, noise=None)
    for rows in ([3, 2, 1, 0], [0], [1], [2, 3]):
        part = Observation(
            images=obs.images[rows], state=obs.state[rows], instructions=tuple(obs.instructions[i] for i in rows)
        )
        logprob = policy.score(part, out.tokens[rows]).logprob.detach().numpy()
        np.testing.assert_allclose(logprob, out.logprob[rows], atol=1e-5)
