"""Acting by CUDA graphs: a forward pass is recorded once for each size of batch, and a replay is one launch.

A replay runs the kernels that were recorded, in their order, so that acting and scoring stay one computation; what is
saved is the host's time for thousands of launches. Batches are filled up to a few sizes, because each has a recording.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from embodyrl.policies.openvla_oft.model import ModelInputs

Forward = Callable[[ModelInputs], tuple[Tensor, Tensor]]


def bucket(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: at most half as many rows more.

    >>> [bucket(count) for count in (1, 3, 5, 9, 17, 64, 65)]
    [1, 3, 6, 12, 24, 64, 96]
    """
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power > 2 and count <= power * 3 // 4 else power


def fill(inputs: ModelInputs, count: int) -> ModelInputs:
    """A batch of `count` rows: those of the inputs, then the first one again."""
    return replace(
        inputs,
        **{name: torch.cat([x, x[:1].expand(count - len(x), *x.shape[1:])]) for name, x in _tensors(inputs).items()},
    )


def _tensors(inputs: ModelInputs) -> dict[str, Tensor]:
    return {f.name: x for f in fields(inputs) if (x := getattr(inputs, f.name)) is not None}


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: Any
    inputs: ModelInputs
    """Where the replay reads."""
    outputs: tuple[Tensor, ...]
    """Where it writes."""


class Recorded:
    """A forward pass without gradients, replayed. Weights may change in place, and must stay where they are.

    What it returns holds until the next call. Where recording fails, it says why, once, and goes on without.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._recordings: dict[tuple[Any, ...], _Recording] = {}
        self._pool: Any = None
        self._works = True

    def __call__(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Logits and values, as the forward pass returns them."""
        count = len(inputs.prompt_ids)
        filled = fill(inputs, bucket(count))
        try:
            recording = self._recording(filled) if self._works else None
        except torch.OutOfMemoryError:
            raise  # going on without would meet it again
        except RuntimeError as error:
            self._works = False
            recording = None
            warnings.warn(f"model.cuda_graphs: acting without, a pass cannot be recorded: {error}", stacklevel=2)
        if recording is None:
            return self._forward(inputs)
        for name, x in _tensors(recording.inputs).items():
            x.copy_(getattr(filled, name))
        recording.graph.replay()
        logits, values = recording.outputs
        return logits[:count], values[:count]

    def _recording(self, inputs: ModelInputs) -> _Recording:
        key = tuple((name, x.shape, x.dtype) for name, x in _tensors(inputs).items())
        if key not in self._recordings:
            self._recordings[key] = self._record(inputs)
        return self._recordings[key]

    def _record(self, inputs: ModelInputs) -> _Recording:
        # Cached casts would be those of the weights at this moment, for ever.
        assert not (torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled())
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries choose kernels and take workspaces at the first call
            self._forward(inputs)
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self._forward(inputs)
        return _Recording(graph, inputs, outputs)
