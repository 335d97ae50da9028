"""From the host to a GPU without waiting for what it is doing."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def on_device(data: Any, device: torch.device | str) -> Tensor:
    """What an array, a tensor or a list holds, on a device; on the host the memory may be shared.

    A plain copy to a GPU ends when the GPU has done all that was asked of it before. From pinned memory it takes its
    turn there, so that the host prepares the next batch meanwhile; torch keeps the memory until it is copied.
    """
    read_only = isinstance(data, np.ndarray) and not data.flags.writeable  # torch shares none of it
    host = torch.tensor(data) if read_only else torch.as_tensor(data)
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
