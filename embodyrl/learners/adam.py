"""AdamW without PyTorch's compiler and profiler hooks, which are slow to import."""

from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer


class _PlainAdamW(AdamW):
    """AdamW without compiler and profiler wrappers, because importing the compiler takes a second of CPU time."""

    profile_hook_step = staticmethod(lambda func: func)
    add_param_group = unwrap(Optimizer.add_param_group)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Perform one optimizer step with the current gradients."""
        if self.defaults["fused"]:
            # On a CPU, the fused step reads tensors in memory order and ignores strides.
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and not parameter.grad.is_contiguous():
                        parameter.grad = parameter.grad.contiguous()
        return _STEP(self, closure)


_STEP = unwrap(AdamW.step)


def build_adam(groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
    """Build AdamW, which is fused on a GPU and for unsharded CPU weights; the default version copies all weights."""
    parameters = [p for group in groups for p in group["params"]]
    plain = all(
        type(p) in (Tensor, torch.nn.Parameter) and p.is_cpu and p.dtype == torch.float32 and p.is_contiguous()
        for p in parameters
    )
    return _PlainAdamW(groups, fused=torch.cuda.is_available() or plain or None, **settings)
