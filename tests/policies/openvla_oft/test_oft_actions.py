import json

import numpy as np
import pytest

from embodyrl.policies.openvla_oft.config import ActionTokenizer, Bounds, normalize, unnormalize

STATISTICS = Bounds(low=(-0.5, 0.0, 2.0), high=(1.0, 1.0, 2.0), mask=(True, False, True))


@pytest.fixture
def tokenizer():
    return ActionTokenizer(vocab_end=32000, n_bins=256)


def test_action_tokens_match_recorded_examples(tokenizer, golden_dir):
    recorded = json.loads((golden_dir / "expected" / "action_tokenizer.json").read_text())
    for token, value in recorded["examples_id_to_value"].items():
        assert tokenizer.decode(np.array(int(token))) == pytest.approx(value, abs=1e-15)
    for value, token in recorded["examples_value_to_id"].items():
        assert tokenizer.encode(float(value)) == token


def test_every_action_token_id_round_trips(tokenizer):
    ids = np.arange(31745, 32000)
    assert np.array_equal(tokenizer.encode(tokenizer.decode(ids)), ids)
    assert tokenizer.decode(np.array(31744)) == tokenizer.decode(np.array(31745))


def test_out_of_range_values_are_clipped(tokenizer):
    assert tokenizer.encode([-7.0, 7.0]).tolist() == [31999, 31744]


def test_unnormalize_matches_hand_computed_values():
    got = unnormalize(np.array([[-1.0, 0.25, 1.0], [1.0, -0.25, -1.0]]), STATISTICS)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [[-0.5, 0.25, 2.0], [1.0, -0.25, 2.0]], atol=1e-6)


def test_normalize_inverts_and_clips():
    got = normalize([[0.25, 0.3, 2.0], [9.0, 9.0, 9.0]], STATISTICS)
    np.testing.assert_allclose(got, [[0.0, 0.3, 0.0], [1.0, 9.0, 0.0]], atol=1e-7)
