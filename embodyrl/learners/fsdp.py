"""Training ranks that shard one policy with FSDP2 (`fully_shard`).

During inference, every rank has the full parameters. A rollout runs no collectives, so ranks may run different numbers
of inferences. During training, the parameters are sharded.
"""

import fcntl
import json
import os
import socket
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from embodyrl.channels.messages import RankInfo
from embodyrl.channels.rendezvous import LOOPBACK, forward_to_proxy
from embodyrl.errors import EmbodyError
from embodyrl.learners.precision import find_layers
from embodyrl.learners.ranks import Ranks, S
from embodyrl.learners.settings import FsdpSettings
from embodyrl.types import ImitationLoss, PolicyScores

_SIOCGIFADDR = 0x8915


class _Root(nn.Module):
    """FSDP root module whose `forward` calls its argument, so that FSDP hooks run for all policy methods."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], PolicyScores | ImitationLoss] | None) -> Any:
        if compute is None:
            return ()
        scores = compute()
        # Copies, because FSDP registers hooks on these tensors, which views do not support.
        tensors = {f.name: value for f in fields(scores) if (value := getattr(scores, f.name)) is not None}
        return type(scores), {name: value.clone() for name, value in tensors.items()}


class ShardedRanks(Ranks):
    """Training rank with FSDP: each process has a shard of the fp32 weights, gradients and optimizer state."""

    shards = True

    def __init__(
        self,
        module: nn.Module,
        rank_info: RankInfo,
        cfg: FsdpSettings,
        *,
        gradient_sync: str = "step",
        bfloat16: bool,
        acts: bool,
    ) -> None:
        """Shard a module that has equal weights on all ranks; collective.

        Args:
            module: the policy's module.
            rank_info: rank of this process.
            cfg: sharding settings.
            gradient_sync: synchronization of gradients between ranks: step or micro_batch.
            bfloat16: gather the layers in bfloat16; master weights and reductions stay float32.
            acts: True if the process also runs inference for rollouts.
        """
        super().__init__(rank_info)
        self._module = module
        self._cfg = cfg
        self._syncs_micro_batches = gradient_sync == "micro_batch"
        self._acts = acts
        device = next(module.parameters()).device.type
        # The mesh needs the process group.
        _join_process_group(rank_info, device)
        shards = rank_info.world if cfg.shard_size == -1 else cfg.shard_size
        if shards == rank_info.world:
            mesh = init_device_mesh(device, (rank_info.world,))
        else:
            # Hybrid: each group of `shards` ranks has one copy of the weights, and groups average their gradients.
            mesh = init_device_mesh(device, (rank_info.world // shards, shards), mesh_dim_names=("replicate", "shard"))
        offload = CPUOffloadPolicy(pin_memory=device == "cuda") if cfg.cpu_offload else OffloadPolicy()
        common: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": cfg.reshard_after_forward,
            "offload_policy": offload,
        }
        mixed = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bfloat16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # Inner units first, the root last: parameters without a unit belong to the enclosing unit.
        for unit in find_layers(module):
            fully_shard(unit, mp_policy=mixed, **common)
        root: Any = _Root(module)
        self._root = root
        fully_shard(root, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **common)
        self._units = [m for m in root.modules() if isinstance(m, FSDPModule)]
        root(None)  # FSDP treats the first module that runs as the root
        self.gather_weights()  # gathered once: FSDP accumulates gradients also for blocks without a forward pass
        self.shard_weights()  # the optimizer needs the shards

    def forward(self, compute: Callable[[], S], *, last: bool) -> S:
        """Run a forward pass through the FSDP root (see `Ranks.forward`)."""
        synchronizes = last or self._syncs_micro_batches
        self._root.set_requires_gradient_sync(synchronizes)
        # FSDP reduces gradients only in the last backward pass; until then, every rank accumulates full gradients.
        self._root.set_is_last_backward(synchronizes)
        kind, tensors = self._root(compute)
        return kind(**tensors)

    def gather_metrics(self, parts: list[dict[str, float]]) -> list[dict[str, float]]:
        """Gather the metrics of all ranks as JSON (see `Ranks.gather_metrics`)."""
        # Metrics are exchanged as JSON, because torch's exchange of objects unpickles received data.
        device = next(self._module.parameters()).device
        encoded = torch.frombuffer(bytearray(json.dumps(parts).encode()), dtype=torch.uint8).to(device)
        # Gathered texts need equal lengths, so exchange the lengths first.
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.rank_info.world)]
        dist.all_gather(lengths, torch.tensor([len(encoded)], device=device))
        longest = max(int(length) for length in lengths)
        padded = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in lengths]
        dist.all_gather(padded, torch.nn.functional.pad(encoded, (0, longest - len(encoded))))
        texts = (row[: int(length)].cpu().numpy().tobytes() for row, length in zip(padded, lengths, strict=True))
        return [part for text in texts for part in json.loads(text)]

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks (see `Ranks.sum_over_ranks`)."""
        dist.all_reduce(tensor)
        return tensor

    def shard_weights(self) -> None:
        """Prepare the shards for an update (see `Ranks.shard_weights`)."""
        # Without the reset, ranks with different numbers of inferences would prefetch in different orders. The reset
        # also frees the full weights.
        self._root.reset_iter_state()
        self._root.set_reshard_after_forward(self._cfg.reshard_after_forward)

    def gather_weights(self) -> None:
        """Gather the full weights on every rank (see `Ranks.gather_weights`)."""
        self._root.set_reshard_after_forward(False)
        for unit in self._units:
            unit.unshard()

    def reshard(self) -> None:
        """Restore the default placement: full weights if the process also runs inference, or shards (see `Ranks`)."""
        if self._acts:
            self.gather_weights()
        else:
            self.shard_weights()

    @contextmanager
    def full_weights(self, *, write: bool) -> Iterator[None]:
        """Gather the full weights on rank 0 inside the block; with `write`, scatter the changed weights afterwards."""
        self.shard_weights()
        is_first = self.rank_info.rank == 0
        # Tied weights occur under each of their names, but are gathered once, because `full` is indexed by identity.
        shards = {name: p for name, p in self._module.named_parameters(remove_duplicate=False)}
        full: dict[int, nn.Parameter] = {}
        for name, shard in shards.items():
            if id(shard) not in full:
                tensor = _gather_tensor(shard, keep=is_first)  # collective
                if write and not is_first:
                    # Other ranks have only names and shapes, so that all ranks run the same code.
                    tensor = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
                full[id(shard)] = nn.Parameter(tensor, requires_grad=shard.requires_grad)
            _replace_parameter(self._module, name, full[id(shard)])
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
                yield
        finally:
            for name, shard in shards.items():
                _replace_parameter(self._module, name, shard)
        if write:
            with torch.no_grad():
                for shard in {id(s): s for s in shards.values()}.values():
                    assert isinstance(shard, DTensor)
                    changed = full.pop(id(shard)).data
                    changed = changed if is_first else torch.empty(shard.shape, dtype=shard.dtype)
                    shard.copy_(_scatter(changed, shard, source=0))
        self.reshard()

    def gather(self, state: Any, *, everywhere: bool = False) -> Any:
        """Replace shards in a tree of lists and dicts with full CPU tensors (see `Ranks.gather`)."""
        if isinstance(state, DTensor):
            return _gather_tensor(state, keep=everywhere or self.rank_info.rank == 0)
        if isinstance(state, dict):
            return {key: self.gather(value) for key, value in state.items()}
        if isinstance(state, list):
            return [self.gather(value) for value in state]
        return state

    def shard_optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return this rank's shard of a full optimizer state (see `Ranks.shard_optimizer_state`)."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def part(value: Tensor, parameter: DTensor) -> Tensor:
            return _scatter(value, parameter) if value.shape == parameter.shape else value

        own_state = {i: {k: part(v, parameters[i]) for k, v in values.items()} for i, values in state["state"].items()}
        return state | {"state": own_state}

    def close(self) -> None:
        """Leave the process group (see `Ranks.close`)."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _join_process_group(rank_info: RankInfo, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(0)  # the only visible GPU
    limit = timedelta(seconds=rank_info.timeout_s)
    for library in ("GLOO", "NCCL"):
        # By default, these libraries listen on the interface of the host's name, or on all interfaces.
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", find_interface(rank_info.host or LOOPBACK))
    host, port = rank_info.host, rank_info.port
    if rank_info.secret:
        host, port = forward_to_proxy(host, port, rank_info.secret).getsockname()
    # A single rank needs no listening socket.
    store: Store = TCPStore(host, port, is_master=False, timeout=limit) if host else HashStore()
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank_info.rank, world_size=rank_info.world, timeout=limit)


def find_interface(host: str) -> str:
    """Return the name of the network interface that this host uses for connections to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends no packet
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:
                continue  # no address
            if socket.inet_ntoa(reply[20:24]) == address or (name == "lo" and address.startswith("127.")):
                return name
    raise EmbodyError(
        f"No network interface has {address}, the address of this host on the route to {host}. Set GLOO_SOCKET_IFNAME."
    )


def _gather_tensor(shard: Tensor, *, keep: bool) -> Tensor:
    """Return the gathered tensor on the CPU, or an empty tensor if `keep` is False; collective."""
    with torch.no_grad():
        full = shard.full_tensor() if isinstance(shard, DTensor) else shard.detach()
        if not keep:
            return full.new_empty(0, device="cpu")
        # Gathering pads uneven shards, so the result may be a view of larger memory.
        padded = full.untyped_storage().nbytes() != full.nbytes
        return full.to("cpu", copy=True) if padded else full.cpu()


def _scatter(full: Tensor, template: DTensor, source: int | None = None) -> Tensor:
    """Return this rank's shard of a tensor, sent by rank `source`. Without `source`, every rank has the tensor."""
    shard = distribute_tensor(full, template.device_mesh, template.placements, src_data_rank=source)
    return shard.to(template.to_local().device)


def _replace_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    module.get_submodule(path).register_parameter(leaf, parameter)
