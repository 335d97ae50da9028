"""embodyrl: reinforcement learning for vision-language-action policies inside simulators.

`embodyrl.compose`, `train`, `evaluate`, `collect` and `sft` are the functions of `embodyrl.api`.
"""

import importlib
from typing import Any

from embodyrl.version import __version__ as __version__

_FUNCTIONS = ("collect", "compose", "evaluate", "sft", "train")


def __getattr__(name: str) -> Any:
    # Found by name on first use: every module imports this one, and the command line must start without what they need.
    if name in _FUNCTIONS:
        return getattr(importlib.import_module("embodyrl.api"), name)
    raise AttributeError(f"module 'embodyrl' has no attribute '{name}'")
