"""Registration of the simulators as Gymnasium environments, such as `embodyrl/LIBERO-object-0-v0`, on import.

`embodyrl/LIBERO-object-0-v0` is task 0 of a suite; `embodyrl/LiberoObject-v0` has all tasks of `env=libero_object`.
`gymnasium.make("embodyrl.gymnasium:embodyrl/LIBERO-object-0-v0")` imports this module first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import gymnasium

from embodyrl.api.environment import SingleEnv, make_env
from embodyrl.config import compose
from embodyrl.envs.libero.factory import TASK_IDS as LIBERO
from embodyrl.envs.maniskill.settings import TASK_IDS as MANISKILL
from embodyrl.envs.metaworld.settings import TASK_IDS as METAWORLD
from embodyrl.envs.tabletop.factory import TASK_IDS as TABLETOP
from embodyrl.errors import ConfigError

Overrides = tuple[str, ...]

TASK_IDS: Mapping[str, Overrides] = {**LIBERO, **MANISKILL, **METAWORLD, **TABLETOP}
"""Config overrides of each single-task id, such as `LIBERO-object-0-v0`. The first override is the value of `env=`."""


def make(
    overrides: Overrides,
    *,
    task: int | None = None,
    words: Sequence[str] = (),
    render_mode: str | None = "rgb_array",
) -> SingleEnv:
    """Create the environment of a Gymnasium id. All registered ids use this function as their entry point.

    Args:
        overrides: option of `env=`, then the config overrides of the id.
        task: task id; only for Gymnasium ids that cover several tasks.
        words: further overrides, as for `embodyrl eval`.
        render_mode: `rgb_array` or None; both render images.

    Raises:
        ConfigError: unknown override or render mode, or `task` for an id of a single task.
        MissingDependencyError: the simulator is not installed.
    """
    env, *fixed_overrides = overrides
    if render_mode not in (None, "rgb_array"):
        raise ConfigError(f"render_mode={render_mode} is not supported; use render_mode='rgb_array'.")
    if task is not None and fixed_overrides:
        raise ConfigError(
            f"task={task}: this id has one task ({' '.join(fixed_overrides)}). Remove task=, or use another id."
        )
    return make_env(env, *fixed_overrides, *([] if task is None else [f"env.eval.task_ids=[{task}]"]), *words)


def register() -> None:
    """Register a Gymnasium id for each simulator task, and for each option of `env=` outside subfolders."""
    names: dict[str, Overrides] = {
        f"{option.title().replace('_', '')}-v0": (option,) for option in compose.options("env") if "/" not in option
    }
    names |= TASK_IDS
    for name, overrides in names.items():
        if (full_id := f"embodyrl/{name}") not in gymnasium.registry:
            gymnasium.register(
                full_id, entry_point=f"{__name__}:make", kwargs={"overrides": overrides}, disable_env_checker=True
            )


register()
