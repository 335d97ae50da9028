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
if os.access(_CACHE if _CACHE.is_dir() else _CACHE.parent, os.W_OK):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_CACHE / "embodyrl" / "torchinductor"))

_NAMES = {name: f"embodyrl.program.commands:{name}" for name in ("compose", "evaluate", "train")}


def _names() -> dict[str, str]:
    """Return the `module:attribute` of each public name, including the names that extensions add."""
    from embodyrl.manifests import declared

    return {**_NAMES, **declared("embodyrl.program")}


def __dir__() -> list[str]:
    return sorted([*_names(), "__version__"])


def __getattr__(name: str) -> Any:
    # Resolved on first use: every module imports this one, and the command line must start without heavy imports.
    if name == "__all__":
        return sorted(_names())
    if name.startswith("_") or (target := _NAMES.get(name) or _names().get(name)) is None:
        raise AttributeError(f"module 'embodyrl' has no attribute '{name}'")
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
