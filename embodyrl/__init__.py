"""embodyrl: reinforcement learning for vision-language-action policies in simulators.

compose, train, evaluate, collect, sft      run the commands
make_env                                    create a Gymnasium environment
load_policy                                 load a trained policy: .act(observation)
GRPO                                        train a language model: GRPO(model, reward, rows).train()
"""

import importlib
import os
from pathlib import Path
from typing import Any

from embodyrl.version import __version__ as __version__

# On import, torch creates the folder of its compiler cache; by default this is a new folder in the temporary folder.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
if os.access(_CACHE if os.path.isdir(_CACHE) else _CACHE.parent, os.W_OK):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_CACHE / "embodyrl" / "torchinductor"))

_NAMES = {
    "GRPO": "embodyrl.api.text",
    "LoadedPolicy": "embodyrl.api.acting",
    "collect": "embodyrl.api.commands",
    "compose": "embodyrl.api.commands",
    "evaluate": "embodyrl.api.commands",
    "load_policy": "embodyrl.api.acting",
    "make_env": "embodyrl.api.environment",
    "sft": "embodyrl.api.commands",
    "train": "embodyrl.api.commands",
}
"""Module of each public name."""


def __dir__() -> list[str]:
    return sorted([*_NAMES, "__version__"])


def __getattr__(name: str) -> Any:
    # Resolved on first use: every module imports this one, and the command line must start without heavy imports.
    if name == "__all__":
        return sorted(_NAMES)
    if name not in _NAMES:
        raise AttributeError(f"module 'embodyrl' has no attribute '{name}'")
    return getattr(importlib.import_module(_NAMES[name]), name)
