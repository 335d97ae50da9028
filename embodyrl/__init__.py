"""embodyrl: reinforcement learning for vision-language-action policies inside simulators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embodyrl.api import collect, compose, evaluate, sft, train

__version__ = "0.1.0"
__all__ = ["__version__", "collect", "compose", "evaluate", "sft", "train"]


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line must start without what they need.
    if name in __all__:
        from embodyrl import api

        return getattr(api, name)
    raise AttributeError(f"module 'embodyrl' has no attribute '{name}'")
