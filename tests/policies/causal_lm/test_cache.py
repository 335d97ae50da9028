"""Cache with reserved space: contents equal those of transformers' cache, and tokens are appended in place."""

import torch
from transformers import LlamaConfig, MistralConfig
from transformers.cache_utils import DynamicLayer

from embodyrl.policies.causal_lm.cache import ReservedLayer, create_reserved_cache


def states(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 2, tokens, 4), torch.randn(rows, 2, tokens, 6)


def test_reserved_cache_matches_a_growing_cache_after_row_selection():
    torch.manual_seed(0)
    layers = ReservedLayer(60), DynamicLayer()
    for step, tokens in enumerate([5, 1, 1, 2, *[1] * 70]):
        new = states(4 if step < 40 else 3, tokens)
        (keys, values), expected = (layer.update(*new) for layer in layers)
        assert torch.equal(keys, expected[0])
        assert torch.equal(values, expected[1])
        if step in (0, 2):
            for layer in layers:
                layer.batch_select_indices(torch.tensor([2, 2, 0, 1]))
        if step == 39:
            for layer in layers:
                layer.batch_select_indices(torch.tensor([3, 0, 1]))
    assert layers[0].get_seq_length() == layers[1].get_seq_length() == 79


def test_tokens_are_appended_without_copying_earlier_tokens():
    layer = ReservedLayer(20)
    layer.update(*states(2, 5))
    keys, values = layer.update(*states(2, 1))
    for _ in range(14):
        more = layer.update(*states(2, 1))
        assert [part.data_ptr() for part in more] == [keys.data_ptr(), values.data_ptr()]
    assert keys.untyped_storage().nbytes() == 4 * 2 * 2 * 20 * 4, "space for at most 20 tokens"


def test_layers_with_a_sliding_window_are_unchanged():
    sliding = create_reserved_cache(MistralConfig(num_hidden_layers=2, sliding_window=8), 20)
    assert not any(isinstance(layer, ReservedLayer) for layer in sliding.layers)
    full = create_reserved_cache(LlamaConfig(num_hidden_layers=2), 20)
    assert all(isinstance(layer, ReservedLayer) for layer in full.layers)
