"""embodyrl: reinforcement learning for vision-language-action policies inside simulators.

compose, train, evaluate, collect, sft      the commands as functions
make_env                                    an environment as a Gymnasium one
load_policy                                 a trained policy: .act(observation)
GRPO                                        text: GRPO(model, reward, rows).train()
"""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodyrl.version import __version__ as __version__

if TYPE_CHECKING:
    from embodyrl.program.acting import LoadedPolicy, load_policy
    from embodyrl.program.commands import GRPO, collect, compose, evaluate, sft, train
    from embodyrl.program.environment import make_env

# When it is imported torch makes the folder of its compiler cache, by default a new one in the temporary folder.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
if os.access(_CACHE if _CACHE.is_dir() else _CACHE.parent, os.W_OK):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_CACHE / "embodyrl" / "torchinductor"))

_HOMES = {
    **dict.fromkeys(("GRPO", "collect", "compose", "evaluate", "sft", "train"), "commands"),
    **dict.fromkeys(("LoadedPolicy", "load_policy"), "acting"),
    "make_env": "environment",
}

__all__ = ["GRPO", "LoadedPolicy", "collect", "compose", "evaluate", "load_policy", "make_env", "sft", "train"]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    # Found by name on first use: every module imports this one, and the command line must start without what they need.
    if name in _HOMES:
        return getattr(importlib.import_module(f"embodyrl.program.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'embodyrl' has no attribute '{name}'")
