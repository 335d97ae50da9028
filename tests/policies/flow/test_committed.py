import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodyrl.errors import ConfigError
from embodyrl.policies.flow.committed import (
    Committed,
    conditioned,
    delayed_loss,
    guidance_weights,
    guided,
    simulated_delays,
)
from embodyrl.policies.flow.policy import FlowPolicy
from embodyrl.policies.flow.settings import RtcMask
from embodyrl.policies.flow.small import FACTORY
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import ActionSpec, CommittedSpec, EnvSpec, GripperConvention, Observation

H, A = 8, 3
PLAIN = EnvSpec(
    name="probe",
    action=ActionSpec(dim=A, gripper=GripperConvention(open=0.0, closed=1.0)),
    tasks=("press the red button",),
    states_per_task=(5,),
    state_dim=4,
)
COMMITTED = replace(PLAIN, state_dim=4 + 2 + 4 * A, committed=CommittedSpec(rows=4, delay=2))
SMALL = {"width": 32, "layers": 2, "heads": 2, "vocabulary": 64, "embodyrl_init": "random"}


def weights(delay: int, end: int, horizon: int, mask: str) -> list[float]:
    return guidance_weights(torch.tensor([delay]), torch.tensor([end]), horizon, RtcMask(mask))[0].tolist()


@pytest.mark.parametrize(
    ("mask", "delay", "end", "expected"),
    [
        ("exp", 2, 4, [1, 1, 0.36771, 0.07675, 0, 0, 0, 0]),
        ("linear", 2, 4, [1, 1, 0.66667, 0.33333, 0, 0, 0, 0]),
        ("ones", 2, 4, [1, 1, 1, 1, 0, 0, 0, 0]),
        ("zeros", 2, 4, [1, 1, 0, 0, 0, 0, 0, 0]),
        ("exp", 2, 6, [1, 1, 0.5706, 0.2871, 0.1145, 0.0258, 0, 0]),
        ("exp", 0, 0, [0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_guidance_weights_match_hand_computed_values(mask, delay, end, expected):
    assert weights(delay, end, 8, mask) == pytest.approx(expected, abs=5e-5)


def committed(rows: torch.Tensor, delay: int, left: int, mask: str = "ones") -> Committed:
    return Committed.of(rows, torch.tensor([[delay, left]] * len(rows)), RtcMask(mask))


@pytest.mark.parametrize("through", [False, True])
def test_guided_velocity_matches_hand_computed_values(through):
    def still(x, t):
        return 0.0 * x, x

    target = committed(torch.ones(1, 1, 1), 1, 1)
    x, t = torch.full((1, 1, 1), 0.2), torch.tensor([0.5])
    v, _ = guided(still, target, x, t, limit=5.0, through_network=through)
    assert v.item() == pytest.approx(-1.6)
    at_noise, _ = guided(still, target, x, torch.tensor([1.0]), limit=5.0, through_network=through)
    assert at_noise.item() == pytest.approx(-5 * 0.8), "the factor is infinite at noise: the limit"
    factors = [
        -guided(still, target, 0 * x, torch.tensor([1 - tau]), limit=5.0, through_network=through)[0].item()
        for tau in (0.0, 0.2, 0.4, 0.6, 0.8)
    ]
    assert factors == pytest.approx([5, 4.25, 2.1667, 2.1667, 4.25], abs=1e-4)


def test_guidance_through_the_network_is_a_vector_jacobian_product():
    torch.manual_seed(0)
    matrix = 0.3 * torch.randn(6, 6, dtype=torch.float64)

    def linear(x, t):
        return (x.flatten(1) @ matrix.T).unflatten(1, (3, 2)), x

    rows, x = torch.randn(2, 3, 2, dtype=torch.float64), torch.randn(2, 3, 2, dtype=torch.float64)
    t = torch.tensor([0.4, 0.7], dtype=torch.float64)
    target = committed(rows, 1, 2)
    v, _ = guided(linear, target, x, t, limit=5.0, through_network=True)
    for row in range(2):
        jacobian = torch.eye(6, dtype=torch.float64) - t[row] * matrix
        error = ((rows[row] - (x - t[:, None, None] * linear(x, t)[0])[row]) * target.weight[row]).flatten()
        factor = min(5.0, ((1 - t[row]) ** 2 + t[row] ** 2) / (t[row] * (1 - t[row])))
        expected = matrix @ x[row].flatten() - factor * (jacobian.T @ error)
        assert torch.allclose(v[row].flatten(), expected)


@pytest.mark.parametrize("through", [False, True])
def test_guidance_is_zero_where_the_estimate_equals_the_committed_actions(through):
    rows = torch.randn(2, 4, 3, dtype=torch.float64)

    def exact(x, t):
        return (x - rows) / t[:, None, None], x

    x, t = torch.randn_like(rows), torch.tensor([0.3, 0.9], dtype=torch.float64)
    v, _ = guided(exact, committed(rows, 2, 4), x, t, limit=5.0, through_network=through)
    assert torch.allclose(v, exact(x, t)[0], atol=1e-12)


def test_loss_with_delay_averages_predicted_actions():
    seen: list[Any] = []

    def wrong_by_one(x, t):
        seen.append((x, t))
        return noise - chunk + 1.0, x

    chunk, noise = torch.randn(1, 4, 2), torch.randn(1, 4, 2)
    executed = torch.randn(1, 4, 2)
    loss = delayed_loss(wrong_by_one, chunk, noise, torch.tensor([0.6]), torch.tensor([2]), executed)
    assert loss.item() == pytest.approx(1.0)
    ((x, t),) = seen
    assert t.tolist() == [pytest.approx([0, 0, 0.6, 0.6])]
    assert torch.equal(x[:, :2], executed[:, :2]), "committed actions have no noise"
    assert torch.allclose(x[:, 2:], 0.6 * noise[:, 2:] + 0.4 * chunk[:, 2:])


def test_committed_actions_are_inputs_at_time_zero():
    seen: list[Any] = []

    def watched(x, t):
        seen.append((x, t))
        return x, x

    rows, x = torch.randn(2, 4, 2), torch.randn(2, 4, 2)
    target = Committed.of(rows, torch.tensor([[1, 3], [0, 0]]), RtcMask.exp)
    conditioned(watched, target, x, torch.tensor([0.7, 0.2]))
    ((given, times),) = seen
    assert times.tolist() == [pytest.approx([0, 0.7, 0.7, 0.7]), pytest.approx([0.2] * 4)]
    assert torch.equal(given[0, 0], rows[0, 0])
    assert torch.equal(given[0, 1:], x[0, 1:])
    assert torch.equal(given[1], x[1])


def build(tmp_path: Path, env: EnvSpec = COMMITTED, **keys: Any) -> FlowPolicy:
    folder = tmp_path / "start"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMALL))
    fixed = {"model_type": "flow_small", "path": str(folder), "precision": "fp32", "num_images_in_input": 0}
    cfg = FACTORY.settings.model_validate(fixed | {"num_action_chunks": H} | keys, strict=False)
    assert FACTORY.validate(cfg) == []
    assert not list(cfg.problems())
    policy = FACTORY.build(cfg, PolicyRequest(env=env, device="cpu", seed=0))
    assert isinstance(policy, FlowPolicy)
    generator = torch.Generator().manual_seed(9)
    for parameter in policy.module.parameters():
        if not parameter.detach().any():
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return policy


def observe(delay: int, left: int, *, plain: bool = False) -> Observation:
    rng = np.random.default_rng(0)
    own = rng.random((2, 4), np.float32)
    actions = rng.random((2, 4 * A), np.float32)
    counts = np.array([[delay, left]] * 2, np.float32)
    state = own if plain else np.concatenate([own, counts, actions], 1)
    return Observation(images=np.zeros((2, 0, 0, 0, 3), np.uint8), state=state, instructions=PLAIN.tasks * 2)


def rest_of(obs: Observation) -> np.ndarray:
    return obs.state[:, 6:].reshape(2, 4, A)


def test_first_chunk_is_independent_of_the_rtc_method(tmp_path):
    plain = build(tmp_path, PLAIN).act(observe(0, 0, plain=True), noise=None).actions
    for rtc in ("off", "guided", "identity", "trained"):
        actions = build(tmp_path, rtc=rtc, rtc_delay=2).act(observe(0, 0), noise=None).actions
        assert np.allclose(actions, plain, atol=1e-6), rtc
    off = build(tmp_path).act(observe(2, 4), noise=None).actions
    assert np.array_equal(off, plain)
    nothing = build(tmp_path, rtc="guided", rtc_guidance=0.0).act(observe(2, 4), noise=None).actions
    assert np.array_equal(nothing[:, 2:], plain[:, 2:]), "guidance 0 equals naive chunks bit for bit"


@pytest.mark.parametrize("rtc", ["guided", "identity"])
def test_guidance_moves_the_chunk_towards_the_committed_actions(tmp_path, rtc):
    plain = build(tmp_path, PLAIN).act(observe(0, 0, plain=True), noise=None).actions
    obs = observe(2, 4)
    actions = build(tmp_path, rtc=rtc, rtc_mask="ones").act(obs, noise=None).actions
    distance = [np.abs(chunk[:, 2:4, :2] - rest_of(obs)[:, 2:, :2]).mean() for chunk in (plain, actions)]
    assert distance[1] < 0.5 * distance[0]


@pytest.mark.parametrize("rtc", ["guided", "identity", "trained"])
def test_frozen_actions_are_those_of_the_previous_chunk(tmp_path, rtc):
    obs = observe(2, 4)
    actions = build(tmp_path, rtc=rtc, rtc_delay=2).act(obs, noise=None).actions
    policy_units = rest_of(obs)[:, :2].copy()
    policy_units[..., -1] = 2.0 * policy_units[..., -1] - 1.0  # the policy's gripper: -1 open, 1 closed
    assert np.allclose(actions[:, :2], policy_units, atol=1e-5)


@pytest.mark.parametrize("rtc", ["guided", "identity", "trained"])
@pytest.mark.parametrize("steps", ["one", "all"])
def test_training_reproduces_the_log_probabilities_of_executed_actions(tmp_path, rtc, steps):
    policy = build(tmp_path, rtc=rtc, rtc_delay=2, stochastic_steps=steps)
    obs = observe(2, 4)
    noise = np.random.default_rng(1).random((2, policy.spec.tokens_per_chunk), np.float32)
    out = policy.act(obs, noise=noise)
    scores = policy.score(obs, out.tokens)
    assert np.allclose(scores.logprob.detach().numpy(), out.logprob, atol=1e-4)
    scores.logprob.sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.module.parameters())
    unguided = build(tmp_path, PLAIN, stochastic_steps=steps).score(observe(0, 0, plain=True), out.tokens)
    assert not np.allclose(unguided.logprob.detach().numpy(), out.logprob, atol=1e-3)


def test_half_of_the_simulated_delays_are_zero():
    """The first chunk of an episode has no delay; its first action is trained in samples without delay only."""
    delays = simulated_delays((np.arange(800, dtype=np.float32) + 0.5) / 800, 8)
    assert np.bincount(delays).tolist() == [400, 50, 50, 50, 50, 50, 50, 50, 50]
    assert simulated_delays(np.array([0.2, 0.999999], np.float32), 0).tolist() == [0, 0]


def test_sft_with_simulated_delays_needs_no_delay_inputs(tmp_path):
    policy = build(tmp_path, PLAIN, rtc="trained", rtc_delay=5)
    actions = np.random.default_rng(2).random((2, H, A), np.float32)
    torch.manual_seed(0)
    loss = policy.imitate(observe(0, 0, plain=True), actions).loss
    assert loss.shape == (2,)
    loss.sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.module.parameters())


def test_committed_actions_of_the_observation_are_inputs_of_sft(tmp_path):
    """Targets are labels, committed actions were executed; the columns of the state contain the executed actions."""
    policy = build(tmp_path, rtc="trained", rtc_delay=2)
    labels = np.random.default_rng(2).uniform(-0.9, 0.9, (2, H, A)).astype(np.float32)
    equal, other = observe(2, 2), observe(2, 2)
    equal.state[:, 6 : 6 + 2 * A] = labels[:, :2].reshape(2, -1)
    equal.state[:, 6 + A - 1 : 6 + 2 * A : A] = (
        labels[:, :2, -1] + 1
    ) / 2  # the environment's gripper: 0 open, 1 closed

    def loss(obs: Observation) -> np.ndarray:
        torch.manual_seed(0)  # of noise, times and delays
        return np.stack([policy.imitate(obs, labels).loss.detach().numpy() for _ in range(4)])

    plain = loss(observe(0, 0, plain=True))
    assert np.allclose(loss(equal), plain, atol=1e-6)
    assert not np.allclose(loss(other), plain, atol=1e-4)


def test_trained_policy_continues_the_committed_actions(tmp_path):
    """Chunks are ramps with a random offset that only the committed actions contain."""
    policy = build(tmp_path, rtc="trained", rtc_delay=2, num_steps=8)
    rng = np.random.default_rng(0)

    def ramps(count: int) -> np.ndarray:
        offset = rng.uniform(-0.6, 0.6, (count, 1, 1))
        chunk = np.broadcast_to(offset + 0.1 * np.arange(H)[:, None] - 0.35, (count, H, A)).astype(np.float32)
        return np.concatenate([chunk[..., :-1], np.ones((count, H, 1), np.float32)], 2)  # gripper: closed

    def after(chunks: np.ndarray, delay: int) -> Observation:
        state = np.zeros((len(chunks), COMMITTED.state_dim), np.float32)
        state[:, 4:6], state[:, 6:] = (delay, 4), chunks[:, :4].reshape(len(chunks), -1)
        images = np.zeros((len(chunks), 0, 0, 0, 3), np.uint8)
        return Observation(images=images, state=state, instructions=PLAIN.tasks * len(chunks))

    torch.manual_seed(0)
    optimizer = torch.optim.Adam(policy.module.parameters())
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20) * (1 - step / 150)
        chunks = ramps(64)
        optimizer.zero_grad()
        policy.imitate(after(0 * chunks, 0), chunks).loss.mean().backward()
        optimizer.step()
    chunks = ramps(100)
    for delay, expected in ((0, 0.35), (1, 0.0), (2, 0.0)):
        found = policy.act(after(chunks, delay), noise=None).actions
        error = np.sqrt(np.square(found - chunks)[:, delay:, :-1].mean())
        assert error == pytest.approx(expected, abs=0.06), delay


def test_delays_longer_than_in_training_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.rtc_delay=1"):
        build(tmp_path, rtc="trained", rtc_delay=1)


def test_unsupported_rtc_combinations_are_refused():
    def problems(**keys: Any) -> list[str]:
        cfg = FACTORY.settings.model_validate({"model_type": "flow_small", "precision": "fp32"} | keys, strict=False)
        return list(cfg.problems())

    assert "model.likelihood=dsrl" in problems(rtc="trained", rtc_delay=2, likelihood="dsrl")[0]
    assert "model.likelihood=fpo" in problems(rtc="guided", likelihood="fpo")[0]
    assert "model.rtc_delay=8" in problems(rtc="trained", num_action_chunks=8)[0]
    assert problems(rtc="trained", rtc_delay=2, likelihood="fpo") == []


def test_frozen_actions_end_with_the_previous_chunk():
    """The delay is longer than the previous chunk."""
    made = Committed.of(torch.ones(1, 6, 2), torch.tensor([[5, 2]]), RtcMask.exp)
    assert made.frozen[0, :, 0].tolist() == [True] * 2 + [False] * 4
    assert made.weight[0, :, 0].tolist() == [1.0] * 2 + [0.0] * 4
