"""Demonstrations as training data of RL: conventions of several folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from demos import ENV, card, demonstration

from embodyrl.data.rl_demonstrations import load_rl_demonstrations
from embodyrl.data.writer import DatasetWriter
from embodyrl.specs import PolicySpec
from embodyrl.types import GripperConvention

POLICY = PolicySpec(
    name="own",
    num_action_chunks=1,
    action_dim=7,
    tokens_per_chunk=7,
    gripper=GripperConvention(open=10.0, closed=20.0),
)


def test_each_folder_is_converted_to_the_conventions_of_the_run(tmp_path: Path) -> None:
    """The second folder contains the first episode with upright frames and another gripper convention."""
    first = demonstration(0)
    first.action[:, -1] = np.resize([-1.0, 1.0], len(first))
    second = replace(first, images=first.images[:, :, ::-1, ::-1].copy(), action=first.action.copy())
    second.action[:, -1] = np.resize([1.0, 0.0], len(first))
    upright = replace(
        ENV,
        cameras=replace(ENV.cameras, rotation_deg=0),
        action=replace(ENV.action, gripper=GripperConvention(open=1.0, closed=0.0)),
    )
    for name, env, episode in (("own", ENV, first), ("upright", upright, second)):
        writer = DatasetWriter(tmp_path / name, replace(card(), env=env))
        writer.append(episode)
        writer.flush()
        writer.close()
    folders = [str(tmp_path / name) for name in ("own", "upright")]
    for order in (folders, folders[::-1]):
        demos = load_rl_demonstrations(order, POLICY, ENV)
        for part in (slice(0, len(first)), slice(len(first), None)):
            np.testing.assert_array_equal(demos.images[part], first.images)
            np.testing.assert_array_equal(demos.action[part, :-1], first.action[:, :-1])
            for actions in (demos.action, demos.executed):
                np.testing.assert_array_equal(actions[part, -1], np.resize([10.0, 20.0], len(first)))
