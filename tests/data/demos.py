"""Small demonstrations with distinguishable contents."""

from __future__ import annotations

import numpy as np

from embodyrl.data.layout import Card, Demonstration, Source
from embodyrl.types import ActionKind, ActionSpec, BenchmarkSpec, CameraSpec, EnvSpec, GripperConvention

ENV = EnvSpec(
    name="shop",
    action=ActionSpec(
        dim=7,
        gripper=GripperConvention(open=-1.0, closed=1.0, binary=True),
        kind=ActionKind.box,
        low=(-1.0,) * 7,
        high=(1.0,) * 6 + (float("inf"),),
    ),
    tasks=("sweep the floor", "open the door"),
    states_per_task=(5, 5),
    cameras=CameraSpec(names=("front", "wrist"), size=(16, 24), rotation_deg=180),
    state_dim=3,
    benchmark=BenchmarkSpec(unnorm_key="shop_no_noops"),
    max_episode_steps=30,
)


def card(*, video: bool = False, **collected: object) -> Card:
    return Card(env=ENV, fps=20, video=video, collected=collected)


def demonstration(number: int, length: int = 6) -> Demonstration:
    rng = np.random.default_rng(number)
    success = np.zeros(length, np.bool_)
    success[-1] = number % 2 == 0
    return Demonstration(
        images=rng.integers(0, 256, (length, 2, 16, 24, 3), np.uint8),
        state=rng.normal(size=(length, 3)).astype(np.float32),
        action=rng.normal(size=(length, 7)).astype(np.float32),
        reward=success.astype(np.float32),
        success=success,
        instruction=ENV.tasks[number % 2],
        source=Source(task_id=number % 2, reset_id=number % 2 * 5, trial=number // 2, seed=100 + number),
    )
