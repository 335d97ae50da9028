from typing import get_args

import numpy as np
import pytest

from embodyrl.algorithms.policy_losses import action_weights
from embodyrl.algorithms.settings import AggregationMode, TokenLevel

# episode 0: two chunks, the second ended after its first action; episode 1: one full chunk
EPISODE = np.array([0, 0, 1])
VALID = np.array([[True, True], [True, False], [True, True]])


@pytest.mark.parametrize(
    ("mode", "level", "expected"),
    [
        ("token-mean", TokenLevel.action_level, [[1 / 5, 1 / 5], [1 / 5, 0], [1 / 5, 1 / 5]]),
        ("token-sum", TokenLevel.action_level, [[1, 1], [1, 0], [1, 1]]),
        ("seq-mean-token-sum", TokenLevel.action_level, [[1 / 2, 1 / 2], [1 / 2, 0], [1 / 2, 1 / 2]]),
        ("seq-mean-token-mean", TokenLevel.action_level, [[1 / 6, 1 / 6], [1 / 6, 0], [1 / 4, 1 / 4]]),
        ("seq-mean-token-sum-norm", TokenLevel.action_level, [[1 / 8, 1 / 8], [1 / 8, 0], [1 / 8, 1 / 8]]),
        ("token-mean", TokenLevel.chunk_level, [[1 / 6, 1 / 6], [1 / 3, 0], [1 / 6, 1 / 6]]),
        ("seq-mean-token-mean", TokenLevel.chunk_level, [[1 / 8, 1 / 8], [1 / 4, 0], [1 / 4, 1 / 4]]),
        ("seq-mean-token-sum-norm", TokenLevel.chunk_level, [[1 / 8, 1 / 8], [1 / 4, 0], [1 / 8, 1 / 8]]),
    ],
)
def test_action_weights_match_hand_computed_values(mode: str, level: TokenLevel, expected: list[list[float]]):
    weight = action_weights(mode, EPISODE, VALID, level=level, longest_episode=2)
    np.testing.assert_allclose(weight, expected, rtol=1e-6)


@pytest.mark.parametrize("mode", get_args(AggregationMode))
def test_token_and_action_level_weights_agree(mode: str):
    pair = [
        action_weights(mode, EPISODE, VALID, level=level, longest_episode=2)
        for level in (TokenLevel.token_level, TokenLevel.action_level)
    ]
    np.testing.assert_array_equal(*pair)


def test_sample_without_executed_action_fails_an_assertion():
    with pytest.raises(AssertionError, match="without an executed action"):
        action_weights(
            "token-mean", EPISODE[:1], np.zeros((1, 2), bool), level=TokenLevel.token_level, longest_episode=1
        )
