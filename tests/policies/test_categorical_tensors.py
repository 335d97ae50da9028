"""Log-probabilities, entropies, gradients and samples of categories in large batches equal those in small batches."""

from __future__ import annotations

import pytest
import torch

from embodyrl.policies.tensors import compute_categorical_scores, sample_inverse_cdf

SMALL, LARGE = 500, 2000
"""Batch sizes below and above the size from which few categories are normalized together."""


def logits(count: int) -> torch.Tensor:
    return 3 * torch.randn(LARGE, 1, count, generator=torch.Generator().manual_seed(count))


def scores(scaled: torch.Tensor, choice: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaf = scaled.clone().requires_grad_()
    logprob, entropy = compute_categorical_scores(leaf, choice)
    (logprob + 3 * entropy).sum().backward()
    assert leaf.grad is not None
    return logprob.detach(), entropy.detach(), leaf.grad


@pytest.mark.parametrize("count", [2, 5, 8, 9])
def test_scores_do_not_depend_on_the_size_of_the_batch(count):
    scaled = logits(count)
    choice = torch.randint(0, count, (LARGE, 1), generator=torch.Generator().manual_seed(0))
    parts = [scores(*part) for part in zip(scaled.split(SMALL), choice.split(SMALL), strict=True)]
    for whole, pieces in zip(scores(scaled, choice), zip(*parts, strict=True), strict=True):
        assert torch.allclose(whole, torch.cat(pieces), atol=1e-6)


@pytest.mark.parametrize("count", [2, 5, 8, 9])
def test_samples_do_not_depend_on_the_size_of_the_batch(count):
    scaled = logits(count)
    noise = torch.rand(LARGE, 1, generator=torch.Generator().manual_seed(1))
    drawn = sample_inverse_cdf(scaled, noise)
    parts = zip(scaled.split(SMALL), noise.split(SMALL), strict=True)
    assert torch.equal(drawn, torch.cat([sample_inverse_cdf(*part) for part in parts]))
    assert len(drawn.unique()) == count
