"""Training samples with an observation history, and the validity of their actions."""

from __future__ import annotations

import numpy as np
from demos import ENV, demonstration

from embodyrl.channels.layout import Record
from embodyrl.data.reader import Demonstrations
from embodyrl.data.samples import Samples

LENGTHS = (4, 3)


def joined() -> Demonstrations:
    parts = [demonstration(i, length) for i, length in enumerate(LENGTHS)]
    stop = np.cumsum(LENGTHS)
    return Demonstrations(
        images=np.concatenate([p.images for p in parts]),
        state=np.concatenate([p.state for p in parts]),
        action=np.concatenate([p.action for p in parts]),
        reward=np.concatenate([p.reward for p in parts]),
        success=np.concatenate([p.success for p in parts]),
        start=stop - LENGTHS,
        stop=stop,
        instruction=np.array(["go"] * 7, object),
    )


def test_history_window_stays_within_its_episode():
    found, valid = joined().window(np.array([0, 3, 4, 5]), 4, before=1)
    assert found.tolist() == [[0, 0, 1, 2], [2, 3, 3, 3], [4, 4, 5, 6], [4, 5, 6, 6]]
    assert valid.tolist() == [[0, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1], [1, 1, 1, 0]]


def test_sample_contains_history_and_action_validity():
    demos = joined()
    found, valid = demos.window(np.arange(7), 4, before=1)
    actions = demos.action[found]
    samples = Samples(demos=demos, steps=np.arange(7), actions=actions, is_solved=demos.success, valid=valid, history=2)
    arena = {
        Record.images: np.zeros((1, 4, *ENV.cameras.size, 3), np.uint8),
        Record.observed_state: np.zeros((1, 6), np.float32),
        Record.instruction: np.zeros((1, 32), np.uint8),
        Record.action: np.zeros((1, 4, 7), np.float32),
        Record.valid: np.zeros((1, 4), np.bool_),
        Record.success: np.zeros((1, 4), np.bool_),
    }
    for row, before in ((0, 0), (3, 2), (4, 4), (6, 5)):
        samples.write(arena, 0, row)  # type: ignore[arg-type]
        assert np.array_equal(arena[Record.images][0], np.concatenate([demos.images[before], demos.images[row]]))
        assert np.array_equal(arena[Record.observed_state][0], np.concatenate([demos.state[before], demos.state[row]]))
        assert np.array_equal(arena[Record.valid][0], valid[row])
        assert np.array_equal(arena[Record.action][0], actions[row])
