"""Inference with CUDA graphs: a forward pass is captured once per batch size, then replayed with a single launch.

A replay runs the captured kernels in order, so acting and scoring use the same computation. It saves the time that the
host needs for thousands of launches. Batches are padded to a few sizes, because each size has its own graph.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from embodyrl.policies.openvla_oft.model import ModelInputs

Forward = Callable[[ModelInputs], tuple[Tensor, Tensor]]


def round_up_batch_size(count: int) -> int:
    """Round a batch size up to the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... (at most 1.5 times larger).

    >>> [round_up_batch_size(count) for count in (1, 3, 5, 9, 17, 64, 65)]
    [1, 3, 6, 12, 24, 64, 96]
    """
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power > 2 and count <= power * 3 // 4 else power


def pad_batch(inputs: ModelInputs, count: int) -> ModelInputs:
    """Pad a batch to `count` rows with copies of its first row."""
    return replace(
        inputs,
        **{
            name: torch.cat([x, x[:1].expand(count - len(x), *x.shape[1:])]) for name, x in _get_tensors(inputs).items()
        },
    )


def _get_tensors(inputs: ModelInputs) -> dict[str, Tensor]:
    return {f.name: x for f in fields(inputs) if (x := getattr(inputs, f.name)) is not None}


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    graph: Any
    inputs: ModelInputs
    """Input buffers, into which each batch is copied before the replay."""
    outputs: tuple[Tensor, ...]
    """Output buffers, overwritten by each replay."""


class GraphedForward:
    """Forward pass without gradients that is captured once and then replayed.

    Weights may change in place, but must keep their memory. Outputs are valid until the next call. If capturing fails,
    a warning is logged once and the plain forward pass is used.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._graphs: dict[tuple[Any, ...], _CapturedGraph] = {}
        self._pool: Any = None
        self._enabled = True

    def __call__(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Return logits and values of the forward pass."""
        count = len(inputs.prompt_ids)
        padded = pad_batch(inputs, round_up_batch_size(count))
        try:
            captured = self._get_graph(padded) if self._enabled else None
        except torch.OutOfMemoryError:
            raise  # the plain forward pass would raise this error too
        except RuntimeError as error:
            self._enabled = False
            captured = None
            warnings.warn(
                f"model.cuda_graphs is ignored, because a forward pass cannot be captured: {error}", stacklevel=2
            )
        if captured is None:
            return self._forward(inputs)
        for name, x in _get_tensors(captured.inputs).items():
            x.copy_(getattr(padded, name))
        captured.graph.replay()
        logits, values = captured.outputs
        return logits[:count], values[:count]

    def _get_graph(self, inputs: ModelInputs) -> _CapturedGraph:
        key = tuple((name, x.shape, x.dtype) for name, x in _get_tensors(inputs).items())
        if key not in self._graphs:
            self._graphs[key] = self._capture(inputs)
        return self._graphs[key]

    def _capture(self, inputs: ModelInputs) -> _CapturedGraph:
        # A graph captured with cached casts would keep using the weights at the time of the capture.
        assert not (torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled())
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):  # libraries select kernels and allocate workspaces at the first call
            self._forward(inputs)
        torch.cuda.current_stream().wait_stream(side_stream)
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self._forward(inputs)
        return _CapturedGraph(graph, inputs, outputs)
