"""Transfer of new weights from training ranks to inference processes, one bucket of shared memory at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import BUCKET, WeightInfo, WeightPart
from embodyrl.channels.messages import LoadWeightsRequest, PublishRequest
from embodyrl.learners.ranks import Ranks
from embodyrl.policies.protocol import weights_changed


def describe_weights(module: nn.Module) -> tuple[WeightInfo, ...]:
    """Return the names, types and sizes of all weights of a module."""
    return tuple(
        WeightInfo(name, w.numel(), str(w.dtype).removeprefix("torch."), w.element_size(), w.requires_grad or learned)
        for name, w, learned in _weights(module)
    )


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield name, tensor, and whether the tensor is a saved buffer that training changes without a gradient."""
    yield from ((name, parameter, False) for name, parameter in module.named_parameters())
    saved = module.state_dict(keep_vars=True)
    yield from ((name, buffer, True) for name, buffer in module.named_buffers() if name in saved)


def publish(request: PublishRequest, module: nn.Module, ranks: Ranks, bucket_arena: Arena) -> None:
    """Write parts of the weights into a bucket, in the receiver's dtype. All ranks call this; the first one writes."""
    parameters = {name: weight for name, weight, _ in _weights(module)}
    writes = ranks.rank_info.rank == 0
    # Gathering is collective: ranks that do not write take part, too.
    whole = {name: ranks.gathered(parameters[name]) for name in dict.fromkeys(part.name for part in request.parts)}
    if writes:
        with bucket_arena.write(request.ticket) as record:
            for part, target in _views(request.parts, bucket_arena, record):
                target.copy_(whole[part.name].detach().reshape(-1)[part.start : part.stop])


def take(request: LoadWeightsRequest, module: nn.Module, bucket_arena: Arena) -> None:
    """Replace parts of the weights by those in a bucket."""
    parameters = {name: weight for name, weight, _ in _weights(module)}
    (record,) = bucket_arena.read([request.ticket])
    with torch.no_grad():
        for part, source in _views(request.parts, bucket_arena, int(record)):
            # In place: CUDA graphs and compiled code reference these tensors.
            parameters[part.name].view(-1)[part.start : part.stop].copy_(source)
    # A vLLM engine and a separate critic check this before inference.
    weights_changed(module)


def _views(parts: tuple[WeightPart, ...], bucket_arena: Arena, record: int) -> Iterator[tuple[WeightPart, Tensor]]:
    bucket = torch.from_numpy(bucket_arena[BUCKET][record])
    for part in parts:
        dtype: torch.dtype = getattr(torch, part.dtype)
        size = (part.stop - part.start) * dtype.itemsize
        yield part, bucket[part.offset : part.offset + size].view(dtype)
