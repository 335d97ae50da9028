"""Losses whose derivatives are simple, as one operation for autograd: of few numbers many small steps take longer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from embodyrl.algorithms.aggregation import SUM_MODES, unit_advantage
from embodyrl.algorithms.protocol import LossInputs, Measured, PolicyLoss
from embodyrl.algorithms.settings import AlgorithmSettings, ValueSettings
from embodyrl.types import PolicyScores

Loss = Callable[[PolicyScores, LossInputs], tuple[Tensor, Measured]]


def loss_and_slopes(
    compute: Loss, policy_loss: PolicyLoss, cfg: AlgorithmSettings, scores: PolicyScores, inputs: LossInputs
) -> tuple[Tensor, Measured]:
    """What `compute` gives for samples all of whose actions are valid, with gradients in closed form.

    With weights w of units: -A r w where the policy loss is not bounded, -entropy_bonus w, and
    value_coef (value - return) w' for half the squared error of a value target.
    """
    with torch.no_grad():
        loss, measured = compute(scores, inputs)
        assert policy_loss.slope is not None
        advantage = unit_advantage(inputs.advantage, inputs.valid, cfg.logprob_type)
        known = [(scores.logprob, _of_tokens(policy_loss.slope(advantage, measured.rows), scores.logprob, inputs, cfg))]
        if cfg.entropy_bonus:
            slope = torch.full_like(measured.rows["entropy"], -cfg.entropy_bonus)
            known.append((scores.entropy, _of_tokens(slope, scores.entropy, inputs, cfg)))
        if isinstance(cfg, ValueSettings):
            known.append((scores.value, (scores.value - inputs.returns) * (cfg.value_coef * inputs.value_weight)))
    return _Known.apply(loss, [slope for _, slope in known], *(score for score, _ in known)), measured


def _of_tokens(units: Tensor, tokens: Tensor, inputs: LossInputs, cfg: AlgorithmSettings) -> Tensor:
    """Slopes by units [B, K, D], [B, K, 1] or [B, 1, 1] as those by tokens [B, L], which add up to units."""
    batch, actions = inputs.weight.shape
    weight = inputs.weight if units.shape[1] == actions else inputs.weight.sum(1, keepdim=True)
    slopes = units * weight[:, :, None]
    if units.shape[2] > 1 and cfg.loss_agg_func not in SUM_MODES:
        slopes = slopes / units.shape[2]  # the loss is a mean over the tokens of an action
    return slopes.expand(batch, actions, tokens.shape[1] // actions).reshape(tokens.shape)


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, slopes: Sequence[Tensor], *scores: Tensor) -> Tensor:
        ctx.slopes = slopes
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *(slope * grads[0] for slope in ctx.slopes)
