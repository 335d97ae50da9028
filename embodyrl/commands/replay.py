"""Replay of recorded episodes: their actions, executed in the simulator from their initial states."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.commands.data_sets import DataSet, convert_source, get_source, open_set
from embodyrl.data.executed_actions import get_executed_actions
from embodyrl.data.layout import ACTION, ENVIRONMENT_PATH, OWN, STATE, STATES_PATH, Source
from embodyrl.data.rows import find_rows, read_vectors
from embodyrl.data.settings import Labels
from embodyrl.envs import ENVS
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.plan.environment import env_context
from embodyrl.plan.saved import read_saved
from embodyrl.plan.schema import Config
from embodyrl.types import DoubleArray, EnvSpec, EpisodeStart, FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedEpisode:
    """Result of one replayed episode."""

    episode: int
    task: str
    steps: int
    """Number of executed steps; the recorded number, unless the episode ended earlier."""
    recorded: bool | None
    """Recorded success; None: not recorded."""
    success: bool
    start_difference: float
    """Maximum absolute difference between recorded and replayed state before the first action."""


def replay(root: Path, overrides: Sequence[str], count: int | None = None) -> Iterator[ReplayedEpisode]:
    """Replay the first `count` episodes of a data set one by one; None: all episodes.

    Args:
        root: folder of the data set.
        overrides: config overrides of the environment; data without `meta/environment.yaml` need env=NAME.
        count: number of episodes.

    Raises:
        ConfigError: the data do not contain initial states or executed actions, or the environment does not fit.
    """
    data_set = open_set(root)
    rows = data_set.rows[: max(0, count) if count is not None else None]
    if not rows:
        raise ConfigError(f"{root}: no episode is selected. Use --episodes=1 or more, and a data set with episodes.")
    cfg = _load_environment(root, overrides)
    factory, split = ENVS.get(cfg.env.env_type), next(iter(cfg.env.splits.values()))
    if problems := factory.validate(cfg.env):
        raise ConfigError(problems)
    context, recorded = env_context(cfg), data_set.card.env
    spec = factory.spec(cfg.env, context)
    if (recorded.action.dim, recorded.state_dim) != (spec.action.dim, spec.state_dim):
        raise ConfigError(
            f"{root}: action size {recorded.action.dim}, state size {recorded.state_dim}; env '{spec.name}': "
            f"{spec.action.dim} and {spec.state_dim}. Set env= and its keys to the values of the recording."
        )
    sources, initial_states = _find_states(data_set, rows, spec, can_restore=getattr(factory, "restores_states", False))
    actions, states = _read_vectors(data_set)
    images = np.zeros((1, len(spec.cameras.names), *spec.cameras.size, 3), np.uint8)
    with closing(factory.make(cfg.env, replace(context, initial_states=initial_states))) as env:
        for row, source in zip(rows, sources, strict=True):
            steps = slice(row["dataset_from_index"], row["dataset_to_index"])
            start = EpisodeStart(
                reset_id=source.reset_id,
                seed=source.seed,
                max_episode_steps=steps.stop - steps.start,
                ignore_terminations=split.ignore_terminations,
            )
            env.reset([0], [start])
            state = np.zeros((1, spec.state_dim), np.float32)
            env.observe([0], images, state)
            result = env.step_chunk([0], actions[None, steps])
            yield ReplayedEpisode(
                episode=row["episode_index"],
                task=recorded.tasks[row[f"{OWN}task_id"]],
                steps=int(result.valid.sum()),
                recorded=row.get(f"{OWN}success"),
                success=bool(result.success.any()),
                start_difference=float(np.abs(state[0] - states[steps.start]).max(initial=0.0)),
            )


def _find_states(
    data_set: DataSet, rows: Sequence[Mapping[str, Any]], spec: EnvSpec, *, can_restore: bool
) -> tuple[list[Source], dict[int, DoubleArray]]:
    """Return the source of each episode, with ids of `spec`, and the simulator states of converted data by reset id.

    Raises:
        ConfigError: the initial state of an episode is not recorded, or the environment cannot restore the state.
    """
    recorded, file = data_set.card.env, data_set.root / STATES_PATH
    converted = {}
    if can_restore and file.is_file():
        with np.load(file, allow_pickle=False) as arrays:
            converted = {int(number): arrays[number] for number in arrays}
    sources: list[Source] = []
    states: dict[int, DoubleArray] = {}
    for row in rows:
        source = get_source(row)
        task = recorded.tasks[source.task_id]
        if source.reset_id >= 0:
            sources.append(convert_source(source, task, recorded, spec))
            continue
        free = [i for i in spec.get_reset_ids(spec.tasks.index(task)) if i not in states] if task in spec.tasks else []
        if source.trial not in converted or not free:
            raise ConfigError(
                f"{data_set.root}: episode {row['episode_index']} ('{task}') has no recorded initial state for env "
                f"'{spec.name}'. Set env= to the environment of the recording. Convert LIBERO data (HDF5) again."
            )
        states[free[0]] = converted[source.trial]
        sources.append(replace(source, reset_id=free[0]))
    return sources, states


def _load_environment(root: Path, overrides: Sequence[str]) -> Config:
    """Compose the config of the environment in which the data were recorded."""
    file = root / ENVIRONMENT_PATH
    if not file.is_file():
        return load_config("eval", ["model=random", *overrides])
    command = "collect" if any(key.startswith("env.train.") for key in read_saved(file)) else "eval"
    return load_saved_config(file, ["model.model_type=random", *overrides], command=command)


def _read_vectors(data_set: DataSet) -> tuple[FloatArray, FloatArray]:
    """Return executed actions [N, A] and states [N, S] of all steps, without frames."""
    card, table = data_set.card, find_rows(data_set.root, data_set.rows)
    if card.collected.get("labels") == Labels.expert and not card.collected.get("expert_noise"):
        raise ConfigError(
            f"{data_set.root} contains labels of the expert, not the executed actions. Replay another data set."
        )
    actions = get_executed_actions(card, data_set.rows, read_vectors(table, ACTION, card.env.action.dim))
    return actions, read_vectors(table, STATE, card.env.state_dim)
