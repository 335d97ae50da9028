"""Random actions cover action spaces of any kind."""

from __future__ import annotations

import math

import numpy as np
import pytest
from settings import model_of

from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import ActionKind, ActionSpec, EnvSpec, Observation

DIALS = ActionSpec(dim=2, kind=ActionKind.multi_discrete, sizes=(2, 3))
PLAIN = ActionSpec(dim=2)
BOX = ActionSpec(dim=2, kind=ActionKind.box, low=(-2.0, -math.inf), high=(6.0, 5.0))


def act(space: ActionSpec, noise: np.ndarray | None, count: int = 4) -> np.ndarray:
    env = EnvSpec(name="probe", action=space, tasks=("",), states_per_task=(1,))
    request = PolicyRequest(env=env, value_dim=0, temperature=1.0, device="cpu", seed=0, trainable=False)
    policy = POLICIES.get("random").build(model_of(model_type="random", num_action_chunks=2), request)
    images, state = np.zeros((count, 0, 0, 0, 3), np.uint8), np.zeros((count, 0), np.float32)
    obs = Observation(images=images, state=state, instructions=("",) * count)
    return policy.act(obs, noise=noise).actions


def constant(value: float) -> np.ndarray:
    return np.full((4, 4), value, np.float32)


LAST = float(np.nextafter(np.float32(1), np.float32(0)))


@pytest.mark.parametrize(
    ("space", "first", "middle", "last"),
    [(PLAIN, (-1, -1), (0, 0), (1, 1)), (DIALS, (0, 0), (1, 1), (1, 2)), (BOX, (-2, -1), (2, 0), (6, 1))],
    ids=["undeclared", "categories", "half bounded"],
)
def test_random_actions_cover_the_action_range(space, first, middle, last):
    for noise, expected in ((constant(0.0), first), (None, middle), (constant(LAST), last)):
        np.testing.assert_allclose(act(space, noise), np.broadcast_to(expected, (4, 2, 2)), atol=1e-6)


def test_random_categories_are_uniform():
    noise = np.random.default_rng(0).random((6000, 4), dtype=np.float32)
    chosen = act(DIALS, noise, count=6000)[:, 0]
    np.testing.assert_allclose(np.bincount(chosen[:, 1].astype(int)) / 6000, [1 / 3] * 3, atol=0.03)
