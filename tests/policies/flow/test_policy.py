"""The small flow policy: sampling, log-probabilities, SFT, values and checkpoints."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from settings import model_of

from embodyrl.channels.layout import build_record_layout
from embodyrl.errors import CheckpointError
from embodyrl.policies.flow.policy import FlowPolicy
from embodyrl.policies.flow.small import FACTORY
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.vla.sampling import START, TIMES, sample_normals, sample_uniforms
from embodyrl.types import ActionSpec, BenchmarkSpec, CameraSpec, EnvSpec, GripperConvention, Observation

WAYS: dict[str, dict[str, Any]] = {
    "sde": {},
    "sde all": {"stochastic_steps": "all"},
    "cps": {"likelihood": "flow_cps", "num_steps": 3},
    "noise": {"likelihood": "flow_noise"},
    "noise mean": {"likelihood": "flow_noise", "joint_logprob": "mean"},
    "fpo": {"likelihood": "fpo"},
    "dsrl": {"likelihood": "dsrl"},
    "dsrl repeated": {"likelihood": "dsrl", "noise_repeated": True},
    "dsrl noisy": {"likelihood": "dsrl", "steered_noise": 0.5},
    "residual": {"likelihood": "residual"},
    "residual repeated": {"likelihood": "residual", "residual_repeated": True, "greedy_start": "random"},
}
ENV = EnvSpec(
    name="probe",
    action=ActionSpec(dim=4, gripper=GripperConvention(open=0.0, closed=1.0)),
    tasks=("press the red button", "open it"),
    states_per_task=(5, 5),
    cameras=CameraSpec(names=("front", "wrist"), size=(24, 24)),
    state_dim=3,
    benchmark=BenchmarkSpec(unnorm_key="probe"),
)
SMALL = {
    "width": 32,
    "layers": 2,
    "heads": 2,
    "planes": [8, 16],
    "maps": 4,
    "vocabulary": 64,
    "embodyrl_init": "random",
}
STATISTICS = {
    "probe": {
        "action": {"q01": [-2.0, 0.0, 0.5, 0.0], "q99": [2.0, 1.0, 0.5, 1.0], "mask": [True, True, True, False]},
        "proprio": {"q01": [0.0, -1.0, 0.0], "q99": [1.0, 1.0, 10.0]},
    }
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a folder without weights; the third action dimension is constant."""
    start = tmp_path / "start"
    start.mkdir()
    (start / "config.json").write_text(json.dumps(SMALL))
    (start / "dataset_statistics.json").write_text(json.dumps(STATISTICS))
    return start


def build(
    folder: Path | None,
    *,
    value_dim: int = 0,
    seed: int = 0,
    env: EnvSpec = ENV,
    temperature: float = 1.0,
    **keys: Any,
) -> FlowPolicy:
    defaults = {"num_action_chunks": 3, "precision": "fp32", "num_images_in_input": len(env.cameras.names)}
    path = None if folder is None else str(folder)
    cfg = FACTORY.settings.model_validate({"model_type": "flow_small", "path": path} | defaults | keys, strict=False)
    assert FACTORY.validate(cfg) == []
    request = PolicyRequest(env=env, value_dim=value_dim, device="cpu", seed=seed, temperature=temperature)
    policy = FACTORY.build(cfg, request)
    assert isinstance(policy, FlowPolicy)
    policy.costs = FACTORY.costs(cfg, env, value_dim)
    return policy


def observe(count: int, seed: int = 0, env: EnvSpec = ENV) -> Observation:
    rng = np.random.default_rng(seed)
    return Observation(
        images=rng.integers(0, 256, (count, len(env.cameras.names), *env.cameras.size, 3), np.uint8),
        state=rng.random((count, env.state_dim), np.float32),
        instructions=tuple(env.tasks[i % len(env.tasks)] for i in range(count)),
    )


def rows(obs: Observation, part: slice) -> Observation:
    return Observation(images=obs.images[part], state=obs.state[part], instructions=obs.instructions[part])


def noise_for(policy: FlowPolicy, count: int) -> np.ndarray:
    return np.random.default_rng(5).random((count, policy.spec.tokens_per_chunk), np.float32)


def randomize_weights(policy: FlowPolicy) -> None:
    """Randomize weights, because paths with zero weights would not be tested."""
    generator = torch.Generator().manual_seed(9)
    for parameter in policy.module.parameters():
        if not parameter.detach().any():
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)


@pytest.mark.parametrize("way", WAYS)
def test_flow_sampled_and_recomputed_log_probs_agree(folder, way):
    policy = build(folder, value_dim=1, **WAYS[way])
    randomize_weights(policy)
    obs = observe(6)
    noise = noise_for(policy, 6)
    out = policy.act(obs, noise=noise)
    assert out.actions.shape == (6, 3, 4)
    assert out.tokens.shape == out.logprob.shape == (6, policy.spec.tokens_per_chunk)
    shares, scored = out.logprob.reshape(6, 3, -1), policy.spec.scored
    assert shares[..., scored - 1].any()
    assert not shares[..., scored:].any()
    scores = policy.score(obs, out.tokens)
    assert scores.logprob.shape == scores.entropy.shape == out.logprob.shape
    assert scores.value.shape == out.value.shape == (6, 1)
    assert np.abs(scores.logprob.detach().numpy() - out.logprob).max() < 1e-5
    assert np.abs(scores.value.detach().numpy() - out.value).max() < 1e-5
    assert np.abs(policy.values(obs) - out.value).max() < 1e-5
    # Batched differently, by the sum that a chunk's ratio is made of.
    part = slice(2, 5)
    apart = policy.score(rows(obs, part), out.tokens[part]).logprob.detach().numpy()
    assert np.abs((apart - out.logprob[part]).sum(1)).max() < 1e-4
    again = policy.act(rows(obs, part), noise=noise[part])
    assert np.abs(again.actions - out.actions[part]).max() < 1e-4


def test_logprobs_are_per_action(folder):
    """Each action's tokens start with those of its log-probabilities, followed by 0."""
    policy = build(folder)
    out = policy.act(observe(4), noise=noise_for(policy, 4))
    shares = out.logprob.reshape(4, 3, -1)
    assert (shares[..., :4] != 0).all()
    assert not shares[..., 4:].any()


def test_actions_have_the_units_of_the_data(folder):
    """Bounds are those of the statistics, gripper values are -1 and 1, and constant dimensions are unchanged."""
    policy = build(folder)
    actions = policy.act(observe(50), noise=noise_for(policy, 50)).actions
    assert (actions[..., 2] == 0.5).all()
    obs = observe(2)
    given = np.array([[[-2.0, 0.0, 0.5, -1.0], [2.0, 1.0, 0.5, 1.0], [0.0, 0.5, 0.5, 1.0]]] * 2, np.float32)
    flowing = policy._scale.from_actions(given, obs)
    assert flowing[0].tolist() == [[-1, -1, 0, -1], [1, 1, 0, 1], [0, 0, 0, 1]]
    np.testing.assert_allclose(policy._scale.to_actions(flowing, obs), given, atol=1e-6)


@pytest.mark.parametrize("start", ["zero", "random"])
def test_greedy_actions_follow_the_ode_and_are_batch_independent(folder, start):
    policy = build(folder, greedy_start=start)
    randomize_weights(policy)
    obs = observe(5)
    out = policy.act(obs, noise=None)
    assert not out.tokens.any()
    assert np.abs(policy.act(rows(obs, slice(3, 4)), noise=None).actions - out.actions[3:4]).max() < 1e-5
    assert np.abs(out.actions[0] - out.actions[1]).max() > 1e-3


@pytest.mark.parametrize("way", ["sde", "noise", "fpo"])
def test_value_loss_does_not_change_the_flow_network(folder, way):
    policy = build(folder, value_dim=1, **WAYS[way])
    randomize_weights(policy)
    obs = observe(4)
    out = policy.act(obs, noise=noise_for(policy, 4))
    scores = policy.score(obs, out.tokens)
    named = dict(policy.module.named_parameters())
    value = torch.autograd.grad(scores.value.sum(), list(named.values()), allow_unused=True, retain_graph=True)
    assert {n for n, g in zip(named, value, strict=True) if g is not None} == {n for n in named if "value_head" in n}
    chance = torch.autograd.grad(scores.logprob.sum(), list(named.values()), allow_unused=True)
    still = {n for n, g in zip(named, chance, strict=True) if g is None or not g.any()}
    assert {name for name in still if "value_head" not in name} == set()


@pytest.mark.parametrize("value_from", ["prefix", "expert"])
def test_values_depend_on_the_observation_only(folder, value_from):
    policy = build(folder, value_dim=3, value_from=value_from)
    obs = observe(4)
    noise = noise_for(policy, 4)
    first, second = (policy.act(obs, noise=n).value for n in (noise, noise[::-1].copy()))
    assert first.shape == (4, 3)
    assert np.abs(first - second).max() < 1e-6
    assert np.abs(first[0] - first[1]).max() > 1e-4


@pytest.mark.parametrize("power", [1.5, 4.0])
def test_validation_loss_uses_fixed_noise(folder, power):
    """x_t = t noise + (1 - t) a, target noise - a, t from 0.001 + 0.999 Beta(power, 1)."""
    policy = build(folder, **({} if power == 1.5 else {"imitated_time": power}))
    randomize_weights(policy)
    obs = observe(8)
    actions = np.random.default_rng(2).uniform([-2, 0, 0.5, -1], [2, 1, 0.5, 1], (8, 3, 4)).astype(np.float32)
    with torch.no_grad():
        found = policy.imitate(obs, actions)
        assert torch.equal(policy.imitate(obs, actions).loss, found.loss)
        a = torch.from_numpy(policy._scale.from_actions(actions, obs))
        noise = sample_normals(np.arange(8), START, (3, 4), torch.device("cpu"))
        t = torch.from_numpy(sample_uniforms(np.arange(8), TIMES, 1)[:, 0] ** (1 / power) * 0.999 + 0.001).float()
        at = t[:, None, None]
        v, _ = policy._compute_velocity(policy._encode_prefix(obs), at * noise + (1 - at) * a, t)
    torch.testing.assert_close(found.loss, (v - noise + a).square().mean((1, 2)))
    many = sample_uniforms(np.arange(4000), TIMES, 1)[:, 0] ** (1 / power)
    assert many.mean() == pytest.approx(power / (power + 1), abs=0.01)  # of Beta(power, 1)
    assert policy.imitate(obs, actions).loss.requires_grad


def test_imitation_loss_is_the_mean_over_pairs(folder):
    """Each pair has its own noise and time, in the order of single pairs."""
    one, three = (build(folder, imitated_pairs=pairs) for pairs in (1, 3))
    three.module.load_state_dict(one.module.state_dict())
    obs = observe(4)
    actions = np.random.default_rng(2).uniform(0.0, 1.0, (4, 3, 4)).astype(np.float32)
    torch.manual_seed(0)
    expected = torch.stack([one.imitate(obs, actions).loss for _ in range(3)]).mean(0)
    torch.manual_seed(0)
    torch.testing.assert_close(three.imitate(obs, actions).loss, expected)


def test_random_greedy_noise_depends_on_the_whole_observation(folder):
    policy, obs = build(folder, greedy_start="random"), observe(3)
    alike = replace(obs, images=np.repeat(obs.images[:1], 3, axis=0))
    starts = policy._get_greedy_start(alike)
    assert len({start.numpy().tobytes() for start in starts}) == 3, "states differ, if images do not"
    assert torch.equal(policy._get_greedy_start(alike), starts)
    assert not build(folder, greedy_start="zero")._get_greedy_start(obs).any()


@pytest.mark.integration
def test_sft_fits_the_demonstrations(folder):
    """One action per instruction: greedy and sampled chunks are close to it."""
    policy = build(folder, num_steps=4)
    obs = observe(16)
    shown = np.where(np.arange(16) % 2 == 0, 0.5, -0.5)[:, None, None] * np.array([2.0, 0.0, 0.0, 2.0])
    actions = (shown + np.array([0.0, 0.5, 0.5, 0.0])).repeat(3, axis=1).astype(np.float32)
    optimizer = torch.optim.Adam(policy.module.parameters(), 3e-3)
    torch.manual_seed(0)
    for _ in range(150):
        optimizer.zero_grad()
        policy.imitate(obs, actions).loss.mean().backward()
        optimizer.step()
    assert np.abs(policy.act(obs, noise=None).actions - actions).mean() < 0.15
    with torch.no_grad():
        assert policy.imitate(obs, actions).accuracy.mean() > 0.5


def test_flow_weights_round_trip(folder, tmp_path):
    policy = build(folder, value_dim=1, likelihood="flow_noise")
    randomize_weights(policy)
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved)
    obs = observe(3)
    for keys in ({}, {"value_dim": 1, "likelihood": "flow_noise"}, {"likelihood": "fpo"}):
        other = build(saved, seed=7, **keys)
        assert np.array_equal(other.act(obs, noise=None).actions, policy.act(obs, noise=None).actions)
    noise = noise_for(policy, 3)
    same = build(saved, seed=7, value_dim=1, likelihood="flow_noise").act(obs, noise=noise)
    assert np.array_equal(same.logprob, policy.act(obs, noise=noise).logprob)
    assert np.array_equal(same.value, policy.act(obs, noise=noise).value)
    assert not np.array_equal(build(folder, seed=7).act(obs, noise=None).actions, other.act(obs, noise=None).actions)


@pytest.mark.parametrize("damage", ["truncated", "missing", "surplus", "shape", "config"])
def test_damaged_weights_are_rejected_without_changes(folder, tmp_path, damage):
    policy = build(folder)
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved)
    weights = saved / "model.safetensors"
    state = load_file(weights)
    key = "network.action_in.weight"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "config":
        (saved / "config.json").write_text('{"width": 32, "wdith": 3}')
    else:
        if damage == "surplus":
            state["network.more"] = state[key].clone()
        elif damage == "missing":
            del state[key]
        else:
            state[key] = state[key][:, :2].contiguous()
        save_file(state, weights)
    with pytest.raises(CheckpointError, match="config.json" if damage == "config" else "model.safetensors"):
        build(saved)
    if damage != "config":
        before = {name: p.clone() for name, p in policy.module.state_dict().items()}
        with pytest.raises(CheckpointError):
            policy.load_weights(saved)
        assert all(torch.equal(before[name], p) for name, p in policy.module.state_dict().items())


def test_flow_spec_matches_the_built_policy(folder):
    for env, path in ((ENV, folder), (ENV, None)):
        policy = build(path, env=env)
        assert policy.costs.num_parameters == sum(p.numel() for p in policy.module.parameters())
    assert model_of("flow_small", precision="fp32").num_steps == 4
    half = FACTORY.settings.model_validate({"model_type": "flow_small"}, strict=False)
    assert "fp32 only" in FACTORY.validate(half)[0]


def test_chunk_record_contains_about_two_action_chunks(folder):
    """Mixed form of 3 x 4 numbers: index and 24 floats in 13 tokens, rounded up to a multiple of K."""
    policy = build(folder)
    assert policy.spec.tokens_per_chunk == 15
    sizes = {field.name: field.record_bytes for field in build_record_layout(ENV, policy.spec).fields}
    assert sizes["tokens"] == 120
    assert build(folder, stochastic_steps="all", num_steps=4).spec.tokens_per_chunk == 27  # 1 + (3 * 12 + 12) / 2 = 25
    assert build(folder, likelihood="fpo").spec.tokens_per_chunk == 9  # 1 + 12 / 2


def test_spec_does_not_depend_on_statistics(folder):
    """`eval ckpt=RUN` plans with the initial folder, which has no statistics; the weights contain them."""
    policy = build(folder)
    (folder / "dataset_statistics.json").unlink()
    assert build(folder).spec == policy.spec


def test_statistics_of_another_size_are_rejected(folder):
    broken = folder / "dataset_statistics.json"
    broken.write_text(broken.read_text().replace("[-2.0, ", "["))
    with pytest.raises(CheckpointError, match="action has lists of different lengths"):
        build(folder)


def test_longer_instruction_in_the_batch_does_not_change_other_rows(folder):
    policy = build(folder)
    randomize_weights(policy)
    obs = observe(2)
    longer = Observation(images=obs.images, state=obs.state, instructions=(obs.instructions[0], "a b c d e f g h i j"))
    found = policy.act(longer, noise=None).actions[0]
    assert np.abs(found - policy.act(obs, noise=None).actions[0]).max() < 1e-5
    shutil.rmtree(folder)
