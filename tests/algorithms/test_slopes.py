"""Losses with derivatives in closed form: the numbers, metrics and gradients of autograd."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from settings import algorithm_of

from embodyrl.algorithms.metrics import metrics_of
from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.protocol import LossInputs
from embodyrl.algorithms.settings import AggregationMode, TokenLevel
from embodyrl.types import PolicyScores

B, K, D = 40, 3, 2


def scores_and_inputs() -> tuple[list[torch.Tensor], LossInputs]:
    """Ratios far below, within and far above every bound, up to where the log-ratio itself is bounded."""
    torch.manual_seed(0)
    leaves = [(torch.randn(B, width, dtype=torch.float64)).requires_grad_() for width in (K * D, K * D, 1)]
    gap = torch.randn(B, K * D, dtype=torch.float64) * torch.logspace(-2, 1.5, B, dtype=torch.float64)[:, None]
    advantage = torch.randn(B, K, dtype=torch.float64)
    advantage[::7] = 0.0
    valid = torch.ones(B, K, dtype=torch.bool)
    return leaves, LossInputs(
        old_logprob=leaves[0].detach() + gap,
        ref_logprob=None,
        advantage=advantage,
        returns=torch.randn(B, 1, dtype=torch.float64),
        old_value=torch.randn(B, 1, dtype=torch.float64),
        valid=valid,
        weight=torch.rand(B, K, dtype=torch.float64),
        value_weight=torch.rand(B, 1, dtype=torch.float64),
        positive_weight=torch.zeros(B, K),
        whole=True,
    )


@pytest.mark.parametrize("level", TokenLevel)
@pytest.mark.parametrize("mode", get_args(AggregationMode))
@pytest.mark.parametrize("keys", [{"entropy_bonus": 0.1, "clip_ratio_c": 3.0}, {"value_coef": 0.7}])
def test_gradients_in_closed_form_are_those_of_autograd(level, mode, keys):
    """Fails where a bound, a weight or a sign is lost; without `whole` the same loss goes through autograd."""
    cfg = algorithm_of("gae", value_clip=None, logprob_type=level, loss_agg_func=mode, **keys)
    algorithm, (leaves, inputs) = Algorithm(cfg), scores_and_inputs()
    found = []
    for one in (inputs, replace(inputs, whole=False)):
        loss, measured = algorithm.loss(PolicyScores(logprob=leaves[0], entropy=leaves[1], value=leaves[2]), one)
        gradients = torch.autograd.grad(loss * 2.0, leaves, allow_unused=True, materialize_grads=True)
        found.append(("Known" in str(loss.grad_fn), loss, gradients, metrics_of([measured])))
    (ours, *known), (theirs, *usual) = found
    assert (ours, theirs) == (True, False)
    torch.testing.assert_close(known, usual, rtol=1e-12, atol=1e-8)  # of a bounded log-ratio


def test_where_numpy_cannot_compute_torch_does():
    """As on a GPU: numpy knows no bfloat16."""
    algorithm, (leaves, inputs) = (
        Algorithm(algorithm_of("gae", value_clip=None, entropy_bonus=0.1)),
        scores_and_inputs(),
    )
    low = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    found = []
    for one in (low, [leaf.detach().double().requires_grad_() for leaf in low]):
        loss, measured = algorithm.loss(PolicyScores(logprob=one[0], entropy=one[1], value=one[2]), inputs)
        gradients = torch.autograd.grad(loss, one)
        assert "Known" in str(loss.grad_fn)
        found.append((loss.double(), [g.double() for g in gradients], metrics_of([measured])))
    torch.testing.assert_close(found[0], found[1], rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("loss_type", "keys"),
    [
        ("ppo_clip", {"value_clip": 0.2}),
        ("ppo_clip", {"value_clip": None, "huber_delta": 1.0}),
        ("ppo_clip", {"value_clip": None, "kl_beta": 0.1}),
        ("ppo_clip", {"value_clip": None, "positive_nll_coef": 0.1}),
        ("gspo", {"value_clip": None}),
    ],
)
def test_other_terms_go_through_autograd(loss_type, keys):
    algorithm, (leaves, inputs) = Algorithm(algorithm_of("gae", loss_type, **keys)), scores_and_inputs()
    inputs = replace(inputs, ref_logprob=inputs.old_logprob)
    loss, _ = algorithm.loss(PolicyScores(logprob=leaves[0], entropy=leaves[1], value=leaves[2]), inputs)
    assert "Known" not in str(loss.grad_fn)
