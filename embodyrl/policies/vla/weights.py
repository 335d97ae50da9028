"""Sizes of a network's weights, measured on the meta device. Importing this module does not import torch."""

import contextlib
import hashlib
import importlib.util
import json
import math
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from embodyrl.config.paths import cache_dir
from embodyrl.errors import EmbodyError
from embodyrl.files import write_atomically
from embodyrl.isolation import NoResultError, call_isolated

_DEADLINE_S = 300.0
_sizes_by_request: dict[str, Mapping[str, "WeightSize"]] = {}


class WeightSize(NamedTuple):
    """Shape and use of one parameter."""

    shape: tuple[int, ...]
    trained: bool
    """False for a parameter in the checkpoint that does not affect the output."""
    adaptable: bool
    """True for the weight of a linear layer or a convolution, which LoRA can adapt."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def fan_in_plus_fan_out(self) -> int:
        """Number of inputs plus outputs, which is the number of parameters of an adapter of rank 1."""
        return self.shape[0] + math.prod(self.shape[1:])


def count_parameters(weights: Mapping[str, WeightSize], *prefixes: str) -> int:
    """Return the number of parameters whose names begin with one of the prefixes, or of all parameters."""
    return sum(size.count for name, size in weights.items() if name.startswith(prefixes or ""))


def get_weight_sizes(network: str, *args: Any) -> Mapping[str, WeightSize]:
    """Return the size and use of each parameter of a network by name.

    If this process has not imported torch, a child process measures the sizes; they are cached in a file.

    Args:
        network: package.module:class of the module.
        args: arguments of its constructor.

    Raises:
        EmbodyError: the child process failed.
    """
    request = f"{network} {args}"
    if request not in _sizes_by_request:
        measure = measure_weights if "torch" in sys.modules else _load_or_measure
        _sizes_by_request[request] = measure(network, *args)
    return _sizes_by_request[request]


def _load_or_measure(network: str, *args: Any) -> Mapping[str, WeightSize]:
    key = f"{network} {args} {_list_source_files(network.partition('.')[0])}"
    file = cache_dir() / "weights" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if file.is_file():
        return {name: WeightSize(tuple(shape), *more) for name, (shape, *more) in json.loads(file.read_bytes()).items()}
    try:
        function = f"{__name__}:measure_weights"
        sizes = call_isolated(function, network, *args, kind=dict[str, WeightSize], timeout_s=_DEADLINE_S)
    except NoResultError as error:
        raise EmbodyError(f"The weights of {network} cannot be counted: {error}") from error
    with contextlib.suppress(OSError):  # a cache that is not writable costs only time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(sizes).encode())
    return sizes


def _list_source_files(package: str) -> list[tuple[str, int, int]]:
    """Return the name, modification time and size of each source file of a package, as the cache key of sizes."""
    module_spec = importlib.util.find_spec(package)
    assert module_spec is not None and module_spec.origin is not None, package
    files = [path for path in [Path(module_spec.origin)] if path.name != "__init__.py"]
    files = files or sorted(Path(module_spec.origin).parent.rglob("*.py"))
    return [(str(path), stat.st_mtime_ns, stat.st_size) for path in files for stat in (path.stat(),)]


def measure_weights(network: str, *args: Any) -> dict[str, WeightSize]:
    """Build the network on the meta device and return the sizes of its parameters."""
    import torch
    from torch import nn

    with torch.device("meta"):
        module = pkgutil.resolve_name(network)(*args)
    layers = {
        f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d)
    }
    return {
        name: WeightSize(tuple(parameter.shape), parameter.requires_grad, name in layers)
        for name, parameter in module.named_parameters()
    }
