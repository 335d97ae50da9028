"""The GPUs of this host, and which process of a run sees which of them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path


def visible_gpus() -> tuple[str, ...]:
    """GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes; found without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))
    # As CUDA reads it: what follows an invalid name is hidden.
    return tuple(takewhile(lambda name: name not in ("", "-1"), (name.strip() for name in visible.split(","))))


@dataclass(frozen=True, slots=True)
class Devices:
    """One GPU for each process that uses any; empty on a host without GPUs."""

    policies: tuple[str, ...] = ()
    """Of the actor ranks, then of the processes that only act."""
    simulators: tuple[str, ...] = ()
    """Dealt to the env workers in turn."""

    def of_policy(self, number: int) -> str | None:
        """GPU of a process that holds the policy; None: it sees what the driver sees."""
        return self.policies[number] if self.policies else None

    def of_env_worker(self, number: int, *, on_gpu: bool | None) -> str | None:
        """GPU of an env worker, see `EnvSpec.on_gpu`; an empty string: it sees none."""
        if on_gpu is False:
            return ""
        return self.simulators[number % len(self.simulators)] if self.simulators else None


def deal_devices(gpus: Sequence[str], policies: int) -> Devices:
    """Give each of so many policy processes a GPU; simulators get those that are left over, or else share all."""
    used = tuple(gpus[number % len(gpus)] for number in range(policies if gpus else 0))
    return Devices(policies=used, simulators=tuple(gpu for gpu in gpus if gpu not in used) or tuple(gpus))
