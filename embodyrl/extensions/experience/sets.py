"""Descriptions and copies of data sets, a few episodes at a time."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.commands.run_folder import locked
from embodyrl.errors import ConfigError
from embodyrl.extensions.demonstrations.cards import stored_card
from embodyrl.extensions.demonstrations.checks import check_layout, differences
from embodyrl.extensions.demonstrations.layout import (
    ACTOR,
    ENVIRONMENT_PATH,
    OWN,
    Actor,
    Card,
    Demonstration,
    Source,
)
from embodyrl.extensions.demonstrations.reader import Demonstrations, load_demonstrations
from embodyrl.extensions.demonstrations.rows import find_rows, read_vectors
from embodyrl.extensions.demonstrations.writer import DatasetWriter, read_episodes
from embodyrl.types import IntArray

_AT_A_TIME = 16
"""Episodes in memory while a data set is copied."""
_UNKNOWN = {"task_id": 0, "reset_id": -1, "trial": 0, "seed": 0, "version": -1}
"""Source of an episode of another program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A data set on disk."""

    root: Path
    card: Card
    rows: list[dict[str, Any]]
    """Table of episodes."""
    actor: IntArray
    """[N] `Actor` of each action."""

    def actors_of(self, row: dict[str, Any]) -> set[int]:
        """Return the authors of an episode's actions."""
        return set(self.actor[row["dataset_from_index"] : row["dataset_to_index"]].tolist())


def open_set(root: Path) -> DataSet:
    """Read the descriptions of a data set, without frames.

    Raises:
        ConfigError: the folder contains no data set, or the data set is damaged.
    """
    card = stored_card(root)
    if problems := check_layout(root):
        raise ConfigError([f"{root}: {problem}" for problem in problems])
    rows = read_episodes(root)
    actor = np.full(rows[-1]["dataset_to_index"] if rows else 0, Actor.unknown, np.int64)
    if card.actors and rows:
        actor = read_vectors(find_rows(root, rows), ACTOR, 1)[:, 0].astype(np.int64)
    return DataSet(root=root, card=card, rows=rows, actor=actor)


def describe(found: DataSet) -> dict[str, Any]:
    """Return the contents of a data set in numbers."""
    rows = found.rows
    known = [row for row in rows if f"{OWN}success" in row]
    counts = Counter(Actor(number).name for number in found.actor.tolist())
    return {
        "folder": str(found.root),
        "env": found.card.env.name,
        "episodes": len(rows),
        "frames": len(found.actor),
        "success": sum(row[f"{OWN}success"] for row in known) / len(known) if known else None,
        "mean_return": sum(row[f"{OWN}return"] for row in known) / len(known) if known else None,
        "actions": dict(counts),
        "versions": dict(sorted(Counter(row.get(f"{OWN}version", -1) for row in rows).items())),
        "tasks": dict(Counter(row["tasks"][0] for row in rows)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Conditions on episodes; None: no condition."""

    success: bool | None = None
    low: float | None = None
    """Minimum return."""
    high: float | None = None
    """Maximum return."""
    actor: Actor | None = None
    """Author of at least one action."""
    version: int | None = None

    def chooses(self, found: DataSet, row: dict[str, Any]) -> bool:
        """Return whether an episode satisfies all conditions; an unknown value satisfies no condition."""
        earned = row.get(f"{OWN}return")
        return (
            (self.success is None or row.get(f"{OWN}success") is self.success)
            and (self.low is None or (earned is not None and earned >= self.low))
            and (self.high is None or (earned is not None and earned <= self.high))
            and (self.actor is None or self.actor in found.actors_of(row))
            and (self.version is None or row.get(f"{OWN}version") == self.version)
        )


def write_set(out: Path, sources: Sequence[DataSet], selection: Selection) -> None:
    """Copy selected episodes of data sets of one environment into a new data set; resume an incomplete copy.

    Raises:
        ConfigError: environments or frame rates differ, or no episode is selected.
        EmbodyError: the folder contains other data, or the disk is full.
    """
    first = sources[0].card
    for other in sources[1:]:
        differs = differences(other.card.env, first.env, "name")
        if not differs and other.card.fps != first.fps:
            differs = f"fps ({other.card.fps:g} and {first.fps:g})"
        if differs:
            raise ConfigError(f"{other.root} differs from {sources[0].root} in {differs}.")
    chosen = [(s, row["episode_index"]) for s in sources for row in s.rows if selection.chooses(s, row)]
    if not chosen:
        raise ConfigError(f"No episode of {', '.join(str(s.root) for s in sources)} satisfies the conditions.")
    with locked(out):
        writer = DatasetWriter(out, _card(sources, selection))
        try:
            if (sources[0].root / ENVIRONMENT_PATH).is_file():
                shutil.copyfile(sources[0].root / ENVIRONMENT_PATH, out / ENVIRONMENT_PATH)
            for source in sources:
                mine = [index for s, index in chosen[len(writer.episodes) :] if s is source]
                for start in range(0, len(mine), _AT_A_TIME):
                    _copy(source, mine[start : start + _AT_A_TIME], writer)
                writer.flush()
        finally:
            writer.close()


def _card(sources: Sequence[DataSet], selection: Selection) -> Card:
    """Return the card of a copy; the initial states are those of all sources."""
    first = sources[0].card
    states = [source.card.collected.get("state_ids") for source in sources]
    collected: dict[str, Any] = {"sources": [str(source.root) for source in sources]}
    known = [one for one in states if isinstance(one, list | tuple) and len(one) == 2]
    if len(known) == len(states):
        collected["state_ids"] = [min(one[0] for one in known), max(one[1] for one in known)]
    collected |= {f"filter_{name}": value for name, value in asdict(selection).items() if value is not None}
    return Card(env=first.env, fps=first.fps, video=first.video, actors=True, collected=collected)


def _copy(source: DataSet, indices: Sequence[int], writer: DatasetWriter) -> None:
    """Append episodes to a writer."""
    demos = load_demonstrations(source.root, only=indices)
    for place, index in enumerate(indices):
        row = source.rows[index]
        origin = {f.name: row.get(f"{OWN}{f.name}", _UNKNOWN[f.name]) for f in fields(Source)}
        writer.append(episode_of(demos, place, Source(**origin)))


def episode_of(demos: Demonstrations, place: int, source: Source) -> Demonstration:
    """Return one of the episodes in memory."""
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
