"""Summaries of data sets, and merged or filtered copies of data sets."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.commands.run_folder import lock_folder
from embodyrl.data.cards import read_stored_card
from embodyrl.data.checks import check_layout, describe_dataset_differences
from embodyrl.data.layout import (
    ACTOR,
    ENVIRONMENT_PATH,
    OWN,
    REWARD,
    SUCCESS,
    UNDESCRIBED,
    Actor,
    Card,
    Demonstration,
    Source,
    image_key,
    is_embodyrl_dataset,
)
from embodyrl.data.reader import Demonstrations, find_episode_count_warnings, load_demonstrations
from embodyrl.data.rows import find_rows, read_success, read_vectors
from embodyrl.data.settings import Labels
from embodyrl.data.tables import read_tasks
from embodyrl.data.videos import VideoReader
from embodyrl.data.writer import DatasetWriter, read_episodes
from embodyrl.errors import ConfigError
from embodyrl.types import EnvSpec, IntArray

_MAX_EPISODES_IN_MEMORY = 16
"""Maximum number of episodes in memory while a data set is copied."""
_DEFAULT_SOURCE = {"task_id": 0, "reset_id": -1, "trial": 0, "seed": 0, "version": -1}
"""Defaults of the `Source` fields for an episode that was recorded by another program."""
_OUTCOME_KEYS = (f"{OWN}success", f"{OWN}return")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Metadata of a data set on disk, without frames."""

    root: Path
    card: Card
    rows: list[dict[str, Any]]
    """Metadata of the episodes, one dict per episode."""
    actor: IntArray
    """[N] actor of each action (policy, expert or person), as a value of `Actor`."""
    task: IntArray
    """[N] task index of each step."""
    names: dict[int, str]
    """Instruction of each task index."""

    def get_instructions(self, row: dict[str, Any]) -> list[str]:
        """Return the distinct instructions of an episode."""
        steps = self.task[row["dataset_from_index"] : row["dataset_to_index"]]
        return [self.names[task] for task in dict.fromkeys(steps.tolist())]

    def get_actors(self, row: dict[str, Any]) -> set[int]:
        """Return the `Actor` values of the actions of an episode."""
        return set(self.actor[row["dataset_from_index"] : row["dataset_to_index"]].tolist())


def open_set(root: Path) -> DataSet:
    """Read the metadata of a data set, without its frames.

    Raises:
        ConfigError: the folder contains no data set, or the data set is damaged.
    """
    card = read_stored_card(root)
    if problems := check_layout(root):
        raise ConfigError([f"{root}: {problem}" for problem in problems])
    rows = read_episodes(root)
    if not is_embodyrl_dataset(root):
        _add_outcomes(root, card, rows)
    if not rows:
        no_steps = np.zeros(0, np.int64)
        return DataSet(root=root, card=card, rows=rows, actor=no_steps, task=no_steps, names={})
    table = find_rows(root, rows)
    actor = np.full(len(table), Actor.unknown, np.int64)
    if card.actors:
        actor = read_vectors(table, ACTOR, 1)[:, 0].astype(np.int64)
    task = table.indices["task_index"].astype(np.int64)
    return DataSet(root=root, card=card, rows=rows, actor=actor, task=task, names=read_tasks(root))


def _add_outcomes(root: Path, card: Card, rows: list[dict[str, Any]]) -> None:
    """Add success and return of each episode to the metadata of a third-party data set, if it has these columns."""
    table = find_rows(root, rows) if rows and len(card.without) < len(_OUTCOME_KEYS) else None
    success = None if table is None or SUCCESS in card.without else read_success(table)
    reward = None if table is None or REWARD in card.without else read_vectors(table, REWARD, 1)[:, 0]
    for row in rows:
        steps = slice(row["dataset_from_index"], row["dataset_to_index"])
        if success is not None:
            row[f"{OWN}success"] = bool(success[steps].any())
        if reward is not None:
            row[f"{OWN}return"] = float(reward[steps].sum())


def describe(data_set: DataSet) -> dict[str, Any]:
    """Return a summary of a data set: size, success rate, mean return, counts per actor, policy version and task."""
    rows = data_set.rows
    success, returns = ([row[key] for row in rows if row.get(key) is not None] for key in _OUTCOME_KEYS)
    counts = Counter(Actor(number).name for number in data_set.actor.tolist())
    return {
        "folder": str(data_set.root),
        "env": data_set.card.env.name,
        "episodes": len(rows),
        "frames": len(data_set.actor),
        "success": sum(success) / len(success) if success else None,
        "mean_return": sum(returns) / len(returns) if returns else None,
        "actions": dict(counts),
        "versions": dict(sorted(Counter(row.get(f"{OWN}version", -1) for row in rows).items())),
        "tasks": dict(Counter(task for row in rows for task in data_set.get_instructions(row))),
        "warnings": find_warnings(data_set),
    }


def find_warnings(data_set: DataSet) -> list[str]:
    """Return warnings about missing episodes and unused video frames of a third-party data set."""
    if is_embodyrl_dataset(data_set.root):
        return []
    warnings = find_episode_count_warnings(data_set.root, len(data_set.rows))
    if not data_set.rows or not data_set.card.video:
        return warnings
    videos = VideoReader(data_set.root, data_set.card, find_rows(data_set.root, data_set.rows), data_set.rows)
    for camera in data_set.card.env.cameras.names:
        videos.check(image_key(camera))
    return warnings + videos.warnings


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Conditions for selecting episodes; conditions that are None are ignored."""

    success: bool | None = None
    low: float | None = None
    """Minimum return of a selected episode."""
    high: float | None = None
    """Maximum return of a selected episode."""
    actor: Actor | None = None
    """Actor of at least one action of each selected episode; None: any actor."""
    version: int | None = None

    def matches(self, data_set: DataSet, row: dict[str, Any]) -> bool:
        """Return whether an episode satisfies all conditions.

        An episode whose success, return or version is unknown fails every condition on that value.
        """
        episode_return = row.get(f"{OWN}return")
        return (
            (self.success is None or row.get(f"{OWN}success") is self.success)
            and (self.low is None or (episode_return is not None and episode_return >= self.low))
            and (self.high is None or (episode_return is not None and episode_return <= self.high))
            and (self.actor is None or self.actor in data_set.get_actors(row))
            and (self.version is None or row.get(f"{OWN}version") == self.version)
        )


def write_set(out: Path, sources: Sequence[DataSet], selection: Selection) -> None:
    """Copy the selected episodes of data sets into a new data set; an interrupted copy is resumed.

    Raises:
        ConfigError: environments or frame rates differ, or no episode is selected.
        EmbodyError: the folder contains other data, or the disk is full.
    """
    first = sources[0].card
    for other in sources[1:]:
        difference = describe_dataset_differences((other.root, other.card), (sources[0].root, first), "name")
        if not difference and other.card.without != first.without:
            missing = (", ".join(card.without) or "none" for card in (other.card, first))
            difference = "unknown columns ({} and {})".format(*missing)
        if difference:
            raise ConfigError(
                f"{other.root} differs from {sources[0].root} in {difference}. "
                "Only data sets of the same environment can be merged."
            )
    selected = [
        (data_set, row_index)
        for data_set in sources
        for row_index, row in enumerate(data_set.rows)
        if selection.matches(data_set, row)
    ]
    if not selected:
        folders = ", ".join(str(data_set.root) for data_set in sources)
        raise ConfigError(f"No episode of {folders} satisfies the conditions. Relax the conditions.")
    for source, index in selected:
        if len(tasks := source.get_instructions(row := source.rows[index])) > 1:
            raise ConfigError(
                f"{source.root}: episode {row['episode_index']} has {len(tasks)} instructions ({', '.join(tasks)}), "
                "but a copied episode can have only one instruction. Train on the original data set (data.path)."
            )
    with lock_folder(out):
        writer = DatasetWriter(out, _build_card(sources, selection))
        try:
            if (sources[0].root / ENVIRONMENT_PATH).is_file():
                shutil.copyfile(sources[0].root / ENVIRONMENT_PATH, out / ENVIRONMENT_PATH)
            env = writer.card.env
            for source in sources:
                indices = [index for data_set, index in selected[len(writer.episodes) :] if data_set is source]
                for start in range(0, len(indices), _MAX_EPISODES_IN_MEMORY):
                    _copy_episodes(source, env, indices[start : start + _MAX_EPISODES_IN_MEMORY], writer)
                writer.flush()
        finally:
            writer.close()


def _build_card(sources: Sequence[DataSet], selection: Selection) -> Card:
    """Return the metadata card of the new data set, with the tasks and initial states of all sources."""
    card = sources[0].card
    states = [source.card.collected.get("state_ids") for source in sources]
    collected: dict[str, Any] = {"sources": [str(source.root) for source in sources]}
    if not all(is_embodyrl_dataset(source.root) and UNDESCRIBED not in source.card.collected for source in sources):
        collected[UNDESCRIBED] = True
    ranges = [ids for ids in states if isinstance(ids, list | tuple) and len(ids) == 2]
    if len(ranges) == len(states):
        collected["state_ids"] = [min(first for first, _ in ranges), max(last for _, last in ranges)]
    collected |= _merge_origins([source.card.collected for source in sources])
    collected |= {f"filter_{name}": value for name, value in asdict(selection).items() if value is not None}
    return Card(
        env=_merge_specs([source.card.env for source in sources]),
        fps=card.fps,
        video=card.video,
        actors=True,
        without=card.without,
        names=card.names,
        collected=collected,
    )


def _merge_origins(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the metadata that describe how the actions and rewards of all data sets were obtained.

    If the data sets have different values of `expert_noise`, executed actions cannot be computed from the expert's
    labels. The merged set is then described as a set of labels.
    """
    origin: dict[str, Any] = {}
    noise = {source.get("expert_noise") or 0.0 for source in sources}
    if len(noise) == 1 and any(noise):
        origin["expert_noise"] = noise.pop()
    if len(noise) > 1 or any(source.get("labels") == Labels.expert for source in sources):
        origin["labels"] = Labels.expert.value
    rewards = [source.get("reward") for source in sources]
    if any(rewards):
        origin["reward"] = rewards[0] if all(reward == rewards[0] for reward in rewards) else {"path": "(several)"}
    return origin


def _merge_specs(envs: Sequence[EnvSpec]) -> EnvSpec:
    """Return a copy of the first spec with the tasks of all specs, in the order of their first occurrence."""
    first = envs[0]
    if all((env.tasks, env.states_per_task) == (first.tasks, first.states_per_task) for env in envs):
        return first
    states: dict[str, int] = {}
    for env in envs:
        for task, count in zip(env.tasks, env.states_per_task, strict=True):
            states[task] = max(count, states.get(task, 0))
    return replace(first, tasks=tuple(states), states_per_task=tuple(states.values()), instructions=())


def get_source(row: Mapping[str, Any]) -> Source:
    """Return the origin of an episode from its metadata."""
    return Source(**{name: row.get(f"{OWN}{name}", default) for name, default in _DEFAULT_SOURCE.items()})


def convert_source(source: Source, task: str, old: EnvSpec, new: EnvSpec) -> Source:
    """Return the origin of an episode, with its task id and reset id converted from the spec `old` to `new`."""
    if old == new or task not in new.tasks:
        return source
    task_id = new.tasks.index(task)
    if source.reset_id >= 0:
        state = source.reset_id - old.get_reset_ids(source.task_id).start
        return replace(source, task_id=task_id, reset_id=new.get_reset_ids(task_id).start + state)
    return replace(source, task_id=task_id)


def _copy_episodes(source: DataSet, env: EnvSpec, indices: Sequence[int], writer: DatasetWriter) -> None:
    """Append the episodes at the row indices `indices` to `writer`; `env` is the spec of the new data set."""
    demos = load_demonstrations(source.root, only=[source.rows[index]["episode_index"] for index in indices])
    for position, index in enumerate(indices):
        row, old = source.rows[index], source.card.env
        origin = get_source(row)
        has_task = f"{OWN}task_id" in row and origin.task_id < len(old.tasks)
        instruction = old.tasks[origin.task_id] if has_task else str(demos.instruction[demos.start[position]])
        episode = get_episode(demos, position, convert_source(origin, instruction, old, env))
        is_success_unknown = row.get(f"{OWN}success", False) is None
        writer.append(replace(episode, success=None) if is_success_unknown else episode)


def get_episode(demos: Demonstrations, index: int, source: Source) -> Demonstration:
    """Return the loaded episode with index `index`, with `source` as its origin."""
    steps = slice(int(demos.start[index]), int(demos.stop[index]))
    return Demonstration(
        images=demos.images[steps],
        state=demos.state[steps],
        action=demos.action[steps],
        reward=demos.reward[steps],
        success=demos.success[steps],
        instruction=str(demos.instruction[steps.start]),
        source=source,
        actor=demos.actor[steps],
    )
