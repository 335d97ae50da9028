"""Initial states (reset ids) and tasks that the splits of a config select."""

from __future__ import annotations

import numpy as np

from embodyrl.envs.settings import EnvSplit, TrainSplit
from embodyrl.errors import ConfigError
from embodyrl.types import EnvSpec, IntArray


def own_tasks(env: EnvSpec) -> range:
    """Return the task ids of the environment's main suite, which are the lowest ids."""
    return range(env.benchmark.suites.count(env.benchmark.suites[0]) if env.benchmark.suites else len(env.tasks))


def select_reset_ids(env: EnvSpec, split: EnvSplit, *, across: bool = False) -> list[int]:
    """Return the reset ids of the selected tasks and initial states in the main suite; with `across`, in all suites.

    Raises:
        ConfigError: a task id or initial state does not exist.
    """
    return reset_id_array(env, split, across=across).tolist()


def reset_id_array(env: EnvSpec, split: EnvSplit, *, across: bool = False) -> IntArray:
    """Return the reset ids of the selected tasks as an array (see `select_reset_ids`)."""
    ids = (get_reset_ids(env, split, task) for task in select_tasks(env, split, across=across))
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(task_ids.start, task_ids.stop) for task_ids in ids)])


def select_tasks(env: EnvSpec, split: EnvSplit, *, across: bool = False) -> list[int]:
    """Return the split's task ids in the main suite; with `across`, the ids of the same tasks in all suites.

    Raises:
        ConfigError: a task id does not exist.
    """
    main_tasks = own_tasks(env)
    tasks = list(split.task_ids) if split.task_ids is not None else list(main_tasks)
    unknown = [task_id for task_id in tasks if task_id not in main_tasks]
    if unknown:
        raise ConfigError(
            f"env.{_get_name(split)}.task_ids: {unknown} do not exist: env '{env.name}' has tasks 0 to "
            f"{len(main_tasks) - 1}."
        )
    suites = len(env.tasks) // len(main_tasks) if across else 1
    return [suite * len(main_tasks) + task for suite in range(suites) for task in tasks]


def get_reset_ids(env: EnvSpec, split: EnvSplit, task: int) -> range:
    """Return a task's reset ids in the training, evaluation or collection split.

    Raises:
        ConfigError: the task has fewer initial states than `state_ids` requires.
    """
    ids, states = env.get_reset_ids(task), get_selected_states(env, split)
    if states is None:
        return ids
    first, last = states
    if last >= len(ids):
        raise ConfigError(
            f"env.{_get_name(split)}.state_ids=[{first},{last}]: task {task} of env '{env.name}' has only states 0 to "
            f"{len(ids) - 1}."
        )
    return ids[first : last + 1]


def _get_name(split: EnvSplit) -> str:
    return "train" if isinstance(split, TrainSplit) else "eval"


def get_selected_states(env: EnvSpec, split: EnvSplit) -> list[int] | None:
    """Return the first and last initial state of a split of a config; None: all states."""
    return split.state_ids or get_state_range(env, _get_name(split))


def get_state_range(env: EnvSpec, split: str) -> list[int] | None:
    """Return the first and last initial state of a split; None (all states) if the environment holds out no states."""
    last = env.states_per_task[0] - 1
    last_train = last - env.benchmark.held_out
    return None if not env.benchmark.held_out else [0, last_train] if split == "train" else [last_train + 1, last]
