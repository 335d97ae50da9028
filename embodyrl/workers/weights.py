"""Transfer of new weights from training ranks to inference processes, one bucket of shared memory at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import BUCKET, WeightInfo, WeightPart
from embodyrl.channels.messages import LoadWeightsRequest, PublishRequest
from embodyrl.learners.ranks import Ranks
from embodyrl.policies.protocol import mark_weights_changed


def describe_weights(module: nn.Module) -> tuple[WeightInfo, ...]:
    """Return the name, dtype and size of each parameter and saved buffer of a module."""
    return tuple(
        WeightInfo(name, w.numel(), str(w.dtype).removeprefix("torch."), w.element_size(), w.requires_grad or learned)
        for name, w, learned in _iterate_weights(module)
    )


def _iterate_weights(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, tensor, True for a buffer in the state_dict) for all parameters and saved buffers."""
    yield from ((name, parameter, False) for name, parameter in module.named_parameters())
    saved = module.state_dict(keep_vars=True)
    yield from ((name, buffer, True) for name, buffer in module.named_buffers() if name in saved)


def publish(request: PublishRequest, module: nn.Module, ranks: Ranks, bucket_arena: Arena) -> None:
    """Write parts of the weights into a bucket, in the receiver's dtype. Collective; the first rank writes."""
    names = dict.fromkeys(part.name for part in request.parts)
    # Gathering is collective, so all ranks run this code.
    tensors = {name: ranks.gather(_get_weight(module, name)).detach() for name in names}
    if ranks.rank_info.rank == 0:
        with bucket_arena.write(request.record_ref) as record:
            bucket = _get_bucket_view(request.parts, bucket_arena, record)
            # One copy from the device: each copy into memory that is not pinned waits for the device.
            staging = torch.empty_like(bucket, device=tensors[request.parts[0].name].device)
            staging = bucket if staging.is_cpu else staging
            for part, target in _get_part_views(request.parts, staging):
                target.copy_(tensors[part.name].reshape(-1)[part.start : part.stop])
            if staging is not bucket:
                bucket.copy_(staging)


def load_bucket(request: LoadWeightsRequest, module: nn.Module, bucket_arena: Arena) -> None:
    """Copy the parts of weights in a bucket into the module's tensors."""
    (record,) = bucket_arena.read([request.record_ref])
    device = _get_weight(module, request.parts[0].name).device
    staging = _get_bucket_view(request.parts, bucket_arena, int(record)).to(device)
    with torch.no_grad():
        for part, source in _get_part_views(request.parts, staging):
            # In place: CUDA graphs and compiled code reference these tensors.
            _get_weight(module, part.name).view(-1)[part.start : part.stop].copy_(source)
    # A vLLM engine and a separate critic check this before inference.
    mark_weights_changed(module)


def _get_weight(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer by name, without a slow list of all parameters."""
    owner, _, attribute = name.rpartition(".")
    return getattr(module.get_submodule(owner), attribute)


def _get_bucket_view(parts: tuple[WeightPart, ...], bucket_arena: Arena, record: int) -> Tensor:
    """Return a uint8 tensor view of the part of a bucket that the weights use."""
    return torch.from_numpy(bucket_arena[BUCKET][record])[: parts[-1].end]


def _get_part_views(parts: tuple[WeightPart, ...], bucket: Tensor) -> Iterator[tuple[WeightPart, Tensor]]:
    for part in parts:
        yield part, bucket[part.offset : part.end].view(getattr(torch, part.dtype))
