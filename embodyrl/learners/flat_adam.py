"""AdamW for small networks on a CPU, where calls cost more than arithmetic: a group's weights as one vector."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

SMALL = 2**20
"""Weights up to which a vector of all is worth its copies."""


@dataclass(slots=True)
class _Moments:
    """Of all weights [n] of a group, in their order."""

    mean: Tensor
    square: Tensor
    steps: int
    weight: Tensor
    """Only during a step: whoever writes the tensors (checkpoints, buckets) knows nothing of the vector."""
    views: list[Tensor]
    """Parts of `weight` as the tensors."""


class FlatAdamW(torch.optim.AdamW):
    """The numbers of torch's AdamW, and its checkpoints.

    Weights and gradients are read by their place in the tensor, whatever order they have in memory. Where a group's
    weights have different histories or some lack a gradient, torch's own step is taken.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        """`params` are float32 and on the CPU; settings as torch's."""
        super().__init__(params, fused=False, **settings)
        self._moments: dict[int, _Moments] = {}
        self._gathered: dict[int, Tensor] = {}

    def gather(self) -> list[list[Tensor]]:
        """Gradients of each group as one vector [n], or as they are where some are missing; `step` takes these."""
        self._gathered = {}
        found: list[list[Tensor]] = []
        for index, group in enumerate(self.param_groups):
            parts = [p.grad for p in group["params"] if p.grad is not None]
            if parts and len(parts) == len(group["params"]) and self._join(index) is not None:
                parts = [_flatten_dense_tensors(parts)]
                self._gathered[index] = parts[0]
            found.append(parts)
        return found

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step with the gradients of `gather`, or with the present ones."""
        assert closure is None, "nobody evaluates a loss here"
        if not self._gathered:
            self.gather()
        gathered, self._gathered = self._gathered, {}
        for index, gradient in gathered.items():
            self._descend(index, gradient)
            for parameter in self.param_groups[index]["params"]:
                parameter.grad = None  # torch's own step below must not see it again
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            self._part()
            super().step()

    # torch's note for its profiler, around every step, takes as long as the step.
    step.hooked = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def _descend(self, index: int, gradient: Tensor) -> None:
        """As torch's `_single_tensor_adam`, operation by operation."""
        group, moments = self.param_groups[index], self._moments[index]
        parameters, (beta1, beta2), lr = group["params"], group["betas"], group["lr"]
        weight = moments.weight
        torch._foreach_copy_(moments.views, parameters)  # type: ignore[reportPrivateImportUsage]
        moments.steps += 1
        if group["weight_decay"]:
            weight.mul_(1 - lr * group["weight_decay"])
        moments.mean.lerp_(gradient, 1 - beta1)
        moments.square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        spread = moments.square.sqrt().div_((1 - beta2**moments.steps) ** 0.5).add_(group["eps"])
        weight.addcdiv_(moments.mean, spread, value=-lr / (1 - beta1**moments.steps))
        torch._foreach_copy_(parameters, moments.views)  # type: ignore[reportPrivateImportUsage]

    def _join(self, index: int) -> _Moments | None:
        """The moments of a group as vectors; None where its weights have not taken as many steps."""
        if index not in self._moments:
            parameters = self.param_groups[index]["params"]
            steps = {int(self.state[p].get("step", 0)) for p in parameters}
            if len(steps) > 1:
                return None
            mean, square = (
                torch.cat([self.state[p].get(name, torch.zeros_like(p)).flatten() for p in parameters])
                for name in ("exp_avg", "exp_avg_sq")
            )
            weight = torch.empty_like(mean)
            views = list(_unflatten_dense_tensors(weight, parameters))
            self._moments[index] = _Moments(mean, square, steps.pop(), weight, views)
        return self._moments[index]

    def _part(self) -> None:
        """Write the moments of each weight where torch has them."""
        for index, moments in self._moments.items():
            parameters = self.param_groups[index]["params"]
            means, squares = (_unflatten_dense_tensors(one, parameters) for one in (moments.mean, moments.square))
            for parameter, mean, square in zip(parameters, means, squares, strict=True):
                step = torch.tensor(float(moments.steps))
                self.state[parameter] = {"step": step, "exp_avg": mean.clone(), "exp_avg_sq": square.clone()}
        self._moments = {}

    def state_dict(self) -> dict[str, Any]:
        """As torch's, in the order of the weights: also where some groups are vectors and others are not."""
        self._part()
        found = super().state_dict()
        found["state"] = dict(sorted(found["state"].items()))
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's."""
        super().load_state_dict(state_dict)
        self._moments = {}


def _leave_compiler_out() -> None:
    """Call methods of torch's optimizers as they are.

    To keep them out of compiled code torch imports its compiler when the first of them is called, which takes a second
    or two; no optimizer is ever compiled here.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        plain = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if plain is not None and not hasattr(plain, "__dynamo_disable"):
            plain.__dynamo_disable = plain


def build_adam(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """AdamW as it suits weights of this size and place."""
    _leave_compiler_out()
    parameters = [p for group in groups for p in group["params"]]
    plain = all(type(p) in (Tensor, torch.nn.Parameter) and p.dtype == torch.float32 and p.is_cpu for p in parameters)
    if plain and sum(p.numel() for p in parameters) <= SMALL:
        return FlatAdamW(groups, **settings)
    # The default on a GPU needs a temporary copy of everything that is trained. On a CPU the fused step takes numbers
    # by their place in memory: wrong, without a word, where a gradient lies there in another order.
    return torch.optim.AdamW(groups, fused=torch.cuda.is_available() or None, **settings)
