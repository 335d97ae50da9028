"""Losses whose derivatives are simple, as one operation for autograd: of few numbers many small steps take longer.

On a CPU they are computed by numpy, whose operations on a few hundred numbers take a third of torch's time.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from embodyrl.algorithms.policy_losses import SUM_MODES, to_units, unit_advantage
from embodyrl.algorithms.protocol import LossInputs, Measured, PolicyLoss
from embodyrl.algorithms.settings import AlgorithmSettings, ValueSettings
from embodyrl.types import PolicyScores

Slopes = tuple[Tensor, Tensor | None, Tensor | None]
"""Gradients of log-probability, entropy and value [B, ...]; None: zero."""


def loss_and_slopes(
    policy_loss: PolicyLoss, cfg: AlgorithmSettings, scores: PolicyScores, inputs: LossInputs
) -> tuple[Tensor, Slopes, Measured]:
    """What `Algorithm.loss` is of samples all of whose actions are valid, with gradients in closed form.

    With weights w of units: those of `policy_loss` times w, -entropy_bonus w, and value_coef (value - return) w' for
    half the squared error of a value target.
    """
    assert policy_loss.closed is not None
    assert scores.logprob.shape == inputs.old_logprob.shape, (scores.logprob.shape, inputs.old_logprob.shape)
    assert inputs.advantage.shape == inputs.valid.shape == inputs.weight.shape, inputs.advantage.shape
    known = scores.logprob, scores.entropy, scores.value
    host = all(one.is_cpu and one.dtype in (torch.float32, torch.float64) for one in known)
    xp: Any = np if host else torch
    tensor = _tensor if host else torch.as_tensor

    def bare(one: Tensor) -> Any:
        return one.numpy() if host else one

    said = scores.logprob.detach()
    logprob, valid, weight = bare(said), bare(inputs.valid), bare(inputs.weight)
    with np.errstate(all="ignore"):  # whoever asked looks at the loss
        new, old = (to_units(one, valid, cfg.logprob_type, whole=True) for one in (logprob, bare(inputs.old_logprob)))
        entropy = to_units(bare(scores.entropy.detach()), valid, cfg.entropy_type, whole=True)
        advantage = unit_advantage(bare(inputs.advantage), valid, cfg.logprob_type)
        units, ratio, clipped, slope = policy_loss.closed(xp, new - old, advantage, cfg)
        shares = _shares(weight, new, cfg)
        loss = policy = (units * shares).sum()
        of_logprob, of_entropy, of_value = tensor(_of_tokens(xp, slope * shares, logprob, weight)), None, None
        if cfg.entropy_bonus:
            shares = -cfg.entropy_bonus * _shares(weight, entropy, cfg)
            loss = loss + (entropy * shares).sum()
            of_entropy = tensor(_of_tokens(xp, shares, logprob, weight))
        rows = {"new": new, "old": old, "entropy": entropy, "ratio": ratio, "clipped": clipped}
        sums = {"policy_loss": policy}
        if isinstance(cfg, ValueSettings):
            assert scores.value.shape == inputs.returns.shape == inputs.value_weight.shape, scores.value.shape
            gap = bare(scores.value.detach()) - bare(inputs.returns)
            pull = gap * bare(inputs.value_weight)
            sums["value_loss"] = 0.5 * (gap * pull).sum()
            loss = loss + cfg.value_coef * sums["value_loss"]
            of_value = tensor(cfg.value_coef * pull)
    given = {"logprob": said, "old_logprob": inputs.old_logprob, "valid": inputs.valid, "weight": inputs.weight}
    measured = Measured(
        rows=given | {name: tensor(row) for name, row in rows.items()},
        sums={name: tensor(value) for name, value in sums.items()},
    )
    return tensor(loss), (of_logprob, of_entropy, of_value), measured


def known(loss: Tensor, slopes: Slopes, scores: PolicyScores) -> Tensor:
    """The loss as one operation of autograd on scores."""
    taught = scores.logprob, scores.entropy, scores.value
    pairs = [(slope, one) for slope, one in zip(slopes, taught, strict=True) if slope is not None]
    return _Known.apply(loss, [slope for slope, _ in pairs], *(one for _, one in pairs))


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.asarray(array))


def _shares(weight: Any, units: Any, cfg: AlgorithmSettings) -> Any:
    """What each of the units [B, K, D], [B, K, 1] or [B, 1, 1] counts in a loss: [B, K, 1] or [B, 1, 1]."""
    weight = weight if units.shape[1] == weight.shape[1] else weight.sum(1, keepdims=True)
    # Unless it is a sum, the loss is a mean over the tokens of an action.
    return weight[:, :, None] / (1 if cfg.loss_agg_func in SUM_MODES else units.shape[2])


def _of_tokens(xp: Any, slopes: Any, tokens: Any, weight: Any) -> Any:
    """Slopes by units as those by tokens [B, L], which add up to units."""
    batch, actions = weight.shape
    spread = xp.empty_like(tokens).reshape(batch, actions, -1)
    spread[...] = slopes
    return spread.reshape(batch, -1)


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, slopes: Sequence[Tensor], *scores: Tensor) -> Tensor:
        ctx.slopes = slopes
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *(slope * grads[0] for slope in ctx.slopes)
