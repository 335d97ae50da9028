"""Summaries of data sets, and merged or filtered copies of data sets."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.commands.run_folder import locked
from embodyrl.data.cards import stored_card
from embodyrl.data.checks import check_layout, set_differences
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
    is_ours,
)
from embodyrl.data.reader import Demonstrations, count_warnings, load_demonstrations
from embodyrl.data.rows import find_rows, read_success, read_vectors
from embodyrl.data.settings import Labels
from embodyrl.data.tables import read_tasks
from embodyrl.data.videos import VideoReader
from embodyrl.data.writer import DatasetWriter, read_episodes
from embodyrl.errors import ConfigError
from embodyrl.types import EnvSpec, IntArray

_AT_A_TIME = 16
"""Maximum number of episodes in memory while a data set is copied."""
_UNKNOWN = {"task_id": 0, "reset_id": -1, "trial": 0, "seed": 0, "version": -1}
"""Defaults of the `Source` fields for an episode that was recorded by another program."""
_OUTCOMES = (f"{OWN}success", f"{OWN}return")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Metadata of a data set on disk, without frames."""

    root: Path
    card: Card
    rows: list[dict[str, Any]]
    """Metadata of the episodes, one dict per episode."""
    actor: IntArray
    """[N] source of each action (policy, expert or person), as a value of `Actor`."""
    task: IntArray
    """[N] task index of each step."""
    names: dict[int, str]
    """Instruction of each task index."""

    def instructions_of(self, row: dict[str, Any]) -> list[str]:
        """Return the distinct instructions of an episode."""
        steps = self.task[row["dataset_from_index"] : row["dataset_to_index"]]
        return [self.names[task] for task in dict.fromkeys(steps.tolist())]

    def actors_of(self, row: dict[str, Any]) -> set[int]:
        """Return the `Actor` values of the actions of an episode."""
        return set(self.actor[row["dataset_from_index"] : row["dataset_to_index"]].tolist())


def open_set(root: Path) -> DataSet:
    """Read the metadata of a data set, without its frames.

    Raises:
        ConfigError: the folder contains no data set, or the data set is damaged.
    """
    card = stored_card(root)
    if problems := check_layout(root):
        raise ConfigError([f"{root}: {problem}" for problem in problems])
    rows = read_episodes(root)
    if not is_ours(root):
        _add_outcomes(root, card, rows)
    if not rows:
        none = np.zeros(0, np.int64)
        return DataSet(root=root, card=card, rows=rows, actor=none, task=none, names={})
    found = find_rows(root, rows)
    actor = np.full(len(found), Actor.unknown, np.int64)
    if card.actors:
        actor = read_vectors(found, ACTOR, 1)[:, 0].astype(np.int64)
    task = found.counters["task_index"].astype(np.int64)
    return DataSet(root=root, card=card, rows=rows, actor=actor, task=task, names=read_tasks(root))


def _add_outcomes(root: Path, card: Card, rows: list[dict[str, Any]]) -> None:
    """Add success and return of each episode to the metadata of a third-party data set, if it has these columns."""
    found = find_rows(root, rows) if rows and len(card.without) < len(_OUTCOMES) else None
    success = None if found is None or SUCCESS in card.without else read_success(found)
    reward = None if found is None or REWARD in card.without else read_vectors(found, REWARD, 1)[:, 0]
    for row in rows:
        steps = slice(row["dataset_from_index"], row["dataset_to_index"])
        if success is not None:
            row[f"{OWN}success"] = bool(success[steps].any())
        if reward is not None:
            row[f"{OWN}return"] = float(reward[steps].sum())


def describe(found: DataSet) -> dict[str, Any]:
    """Return a summary of a data set: size, success rate, mean return, counts per actor, policy version and task."""
    rows = found.rows
    success, earned = ([row[key] for row in rows if row.get(key) is not None] for key in _OUTCOMES)
    counts = Counter(Actor(number).name for number in found.actor.tolist())
    return {
        "folder": str(found.root),
        "env": found.card.env.name,
        "episodes": len(rows),
        "frames": len(found.actor),
        "success": sum(success) / len(success) if success else None,
        "mean_return": sum(earned) / len(earned) if earned else None,
        "actions": dict(counts),
        "versions": dict(sorted(Counter(row.get(f"{OWN}version", -1) for row in rows).items())),
        "tasks": dict(Counter(task for row in rows for task in found.instructions_of(row))),
        "warnings": find_warnings(found),
    }


def find_warnings(found: DataSet) -> list[str]:
    """Return warnings about missing episodes and unused video frames of a third-party data set."""
    if is_ours(found.root):
        return []
    warnings = count_warnings(found.root, len(found.rows))
    if not found.rows or not found.card.video:
        return warnings
    videos = VideoReader(found.root, found.card, find_rows(found.root, found.rows), found.rows)
    for camera in found.card.env.cameras.names:
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
    """Author of at least one action of each selected episode; None: any author."""
    version: int | None = None

    def chooses(self, found: DataSet, row: dict[str, Any]) -> bool:
        """Return whether an episode satisfies all conditions.

        An episode whose success, return or version is unknown fails every condition on that value.
        """
        earned = row.get(f"{OWN}return")
        return (
            (self.success is None or row.get(f"{OWN}success") is self.success)
            and (self.low is None or (earned is not None and earned >= self.low))
            and (self.high is None or (earned is not None and earned <= self.high))
            and (self.actor is None or self.actor in found.actors_of(row))
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
        differs = set_differences((other.root, other.card), (sources[0].root, first), "name")
        if not differs and other.card.without != first.without:
            lacks = (", ".join(card.without) or "none" for card in (other.card, first))
            differs = "unknown columns ({} and {})".format(*lacks)
        if differs:
            raise ConfigError(
                f"{other.root} differs from {sources[0].root} in {differs}. "
                "Only data sets of the same environment can be merged."
            )
    chosen = [(s, place) for s in sources for place, row in enumerate(s.rows) if selection.chooses(s, row)]
    if not chosen:
        raise ConfigError(
            f"No episode of {', '.join(str(s.root) for s in sources)} satisfies the conditions. Relax them."
        )
    for source, index in chosen:
        if len(tasks := source.instructions_of(row := source.rows[index])) > 1:
            raise ConfigError(
                f"{source.root}: episode {row['episode_index']} has {len(tasks)} instructions ({', '.join(tasks)}), "
                "but a copied episode can have only one. Train on the original data set instead (data.path)."
            )
    with locked(out):
        writer = DatasetWriter(out, _card(sources, selection))
        try:
            if (sources[0].root / ENVIRONMENT_PATH).is_file():
                shutil.copyfile(sources[0].root / ENVIRONMENT_PATH, out / ENVIRONMENT_PATH)
            env = writer.card.env
            for source in sources:
                mine = [index for s, index in chosen[len(writer.episodes) :] if s is source]
                for start in range(0, len(mine), _AT_A_TIME):
                    _copy(source, env, mine[start : start + _AT_A_TIME], writer)
                writer.flush()
        finally:
            writer.close()


def _card(sources: Sequence[DataSet], selection: Selection) -> Card:
    """Return the metadata card of the new data set, with the tasks and initial states of all sources."""
    first = sources[0].card
    states = [source.card.collected.get("state_ids") for source in sources]
    collected: dict[str, Any] = {"sources": [str(source.root) for source in sources]}
    if not all(is_ours(source.root) and UNDESCRIBED not in source.card.collected for source in sources):
        collected[UNDESCRIBED] = True
    known = [one for one in states if isinstance(one, list | tuple) and len(one) == 2]
    if len(known) == len(states):
        collected["state_ids"] = [min(one[0] for one in known), max(one[1] for one in known)]
    collected |= _origin([source.card.collected for source in sources])
    collected |= {f"filter_{name}": value for name, value in asdict(selection).items() if value is not None}
    return Card(
        env=_joined_env([source.card.env for source in sources]),
        fps=first.fps,
        video=first.video,
        actors=True,
        without=first.without,
        names=first.names,
        collected=collected,
    )


def _origin(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the source of the actions and rewards in all sets, for readers that need executed actions or rewards.

    Executed actions cannot be computed from labels with different amounts of noise: such a set counts as labels.
    """
    found: dict[str, Any] = {}
    noise = {source.get("expert_noise") or 0.0 for source in sources}
    if len(noise) == 1 and any(noise):
        found["expert_noise"] = noise.pop()
    if len(noise) > 1 or any(source.get("labels") == Labels.expert for source in sources):
        found["labels"] = Labels.expert.value
    rewards = [source.get("reward") for source in sources]
    if any(rewards):
        found["reward"] = rewards[0] if all(one == rewards[0] for one in rewards) else {"path": "(several)"}
    return found


def _joined_env(envs: Sequence[EnvSpec]) -> EnvSpec:
    """Return a copy of the first spec with the tasks of all specs, in the order of their first occurrence."""
    first = envs[0]
    if all((env.tasks, env.states_per_task) == (first.tasks, first.states_per_task) for env in envs):
        return first
    states: dict[str, int] = {}
    for env in envs:
        for task, count in zip(env.tasks, env.states_per_task, strict=True):
            states[task] = max(count, states.get(task, 0))
    return replace(first, tasks=tuple(states), states_per_task=tuple(states.values()), instructions=())


def _moved(source: Source, task: str, old: EnvSpec, new: EnvSpec) -> Source:
    """Return the origin of an episode, with its task id and reset id converted from the spec `old` to `new`."""
    if old == new or task not in new.tasks:
        return source
    number = new.tasks.index(task)
    if source.reset_id >= 0:
        state = source.reset_id - old.reset_ids_of(source.task_id).start
        return replace(source, task_id=number, reset_id=new.reset_ids_of(number).start + state)
    return replace(source, task_id=number)


def _copy(source: DataSet, env: EnvSpec, indices: Sequence[int], writer: DatasetWriter) -> None:
    """Append the episodes at the row indices `indices` to `writer`; `env` is the spec of the new data set."""
    demos = load_demonstrations(source.root, only=[source.rows[index]["episode_index"] for index in indices])
    for place, index in enumerate(indices):
        row = source.rows[index]
        origin = {f.name: row.get(f"{OWN}{f.name}", _UNKNOWN[f.name]) for f in fields(Source)}
        old, task = source.card.env, int(origin["task_id"])
        known = f"{OWN}task_id" in row and task < len(old.tasks)
        named = old.tasks[task] if known else str(demos.instruction[demos.start[place]])
        writer.append(episode_of(demos, place, _moved(Source(**origin), named, old, env)))


def episode_of(demos: Demonstrations, place: int, source: Source) -> Demonstration:
    """Return the loaded episode with index `place`, with `source` as its origin."""
    part = slice(int(demos.start[place]), int(demos.stop[place]))
    return Demonstration(
        images=demos.images[part],
        state=demos.state[part],
        action=demos.action[part],
        reward=demos.reward[part],
        success=demos.success[part],
        instruction=str(demos.instruction[part.start]),
        source=source,
        actor=demos.actor[part],
    )
