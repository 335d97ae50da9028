"""Small networks: clipping bounds and independence of the sampling temperature."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from settings import model_of

from embodyrl.policies import POLICIES
from embodyrl.policies.actor_critic.policy import RunningMoments
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import ActionSpec, EnvSpec, Observation

ENV = EnvSpec(name="e", action=ActionSpec(dim=2), tasks=("t",), states_per_task=(1,), state_dim=3)


def test_normalized_states_are_clipped() -> None:
    """Mean 1 and deviation 2: clipped at ten deviations."""
    moments = RunningMoments(1)
    moments.update(torch.tensor([[-1.0], [3.0]]))
    found = moments(torch.tensor([[2.0], [1000.0], [-1000.0]]))
    torch.testing.assert_close(found, torch.tensor([[0.5], [10.0], [-10.0]]))


def test_squashed_deviation_is_bounded() -> None:
    from embodyrl.policies.soft_actor.head import SquashedHead

    head = SquashedHead((-1.0,), (1.0,))
    log_std = torch.tensor([-100.0, -1.0, 100.0])
    mean, found = head.get_mean_and_log_std(torch.stack([torch.full((3,), 0.5), log_std], 1)[:, None])
    assert mean.flatten().tolist() == [0.5] * 3
    assert found.flatten().tolist() == [-20.0, -1.0, 2.0]


@pytest.mark.parametrize("name", ["mlp"])
def test_imitation_loss_is_independent_of_the_rollout_temperature(name: str) -> None:
    rng = np.random.default_rng(0)
    state = rng.normal(size=(4, 3)).astype(np.float32)
    obs = Observation(images=np.zeros((4, 0, 0, 0, 3), np.uint8), state=state, instructions=("",) * 4)
    actions = rng.uniform(-1, 1, (4, 1, 2)).astype(np.float32)
    losses = [
        POLICIES.get(name)
        .build(model_of(name, num_action_chunks=1), PolicyRequest(env=ENV, device="cpu", seed=0, temperature=warm))
        .imitate(obs, actions)
        .loss
        for warm in (1.0, 0.5)
    ]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("squashed", [False, True])
def test_initial_deviation_follows_the_demonstrations_unless_set(squashed: bool) -> None:
    obs = Observation(
        images=np.zeros((1, 0, 0, 0, 3), np.uint8), state=np.zeros((1, 3), np.float32), instructions=("",)
    )
    request = PolicyRequest(env=ENV, device="cpu", seed=0, action_log_std=(-3.0, -0.5))
    for typed, expected in (({}, [-3.0, -0.5]), ({"log_std_init": -1.0}, [-1.0, -1.0])):
        cfg = model_of("mlp", num_action_chunks=1, squashed=squashed, **typed)
        policy = POLICIES.get("mlp").build(cfg, request)
        _, log_std = policy.module.head.get_mean_and_log_std(policy.module.outputs(policy.features(obs)))
        assert log_std.flatten().tolist() == pytest.approx(expected, abs=0.05)
