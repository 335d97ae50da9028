"""What a training step consumed, as files: `rollout.dump` writes it before the update, `embodyrl replay` reads it."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.channels.arena import Arena
from embodyrl.errors import CheckpointError
from embodyrl.files import replacing
from embodyrl.scheduler.rollout import RolloutResult
from embodyrl.scheduler.slot import KEPT
from embodyrl.types import EarlierPart, Episode, EpisodeSpec, PreparedBatch

_FILE = "dump"
_SPEC = tuple(f.name for f in fields(EpisodeSpec))
_NOT_EARLIER = [-1] * len(_SPEC)
"""In place of a spec: the episode began in this step."""
_PER_CHUNK = KEPT
_FLAGS = ("terminated", "truncated", "cut")
_BATCH = tuple(f.name for f in fields(PreparedBatch) if f.name != "metrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What the update of one training step was given; records are rows of `fields`."""

    step: int
    """As in metrics.jsonl: 1 is the first."""
    fields: dict[str, np.ndarray]
    """Contents of the arena's records by name, [M, ...], before the update."""
    collection: RolloutResult
    batch: PreparedBatch


def dump_folder(run: Path, step: int) -> Path:
    """Where the dump of a training step lies."""
    return run / "dumps" / f"step_{step:06d}"


def weights_folder(run: Path, step: int) -> Path | None:
    """The checkpoint that a training step began with; None: the run's first weights."""
    return run / "checkpoints" / f"step_{step - 1:06d}" if step > 1 else None


def dumped_steps(run: Path) -> list[int]:
    """Steps of a run that were dumped, ascending."""
    return sorted(int(folder.name.removeprefix("step_")) for folder in (run / "dumps").glob("step_*"))


def write_dump(run: Path, step: int, arena: Arena, collection: RolloutResult, batch: PreparedBatch) -> None:
    """Write the dump of a step, complete or not at all; dumps whose checkpoint was pruned go.

    Raises:
        OSError: it could not be written (full disk).
    """
    from safetensors import SafetensorError

    from embodyrl.checkpoint.tensors import save_state

    records = np.concatenate([np.zeros(0, np.int64), *(episode.records for episode in collection.episodes)])
    row_of = {int(record): row for row, record in enumerate(records)}
    rows = np.array([row_of[int(record)] for record in batch.records], dtype=np.int64)
    tree = {
        "fields": {f.name: arena[f.name][records] for f in arena.layout.fields},
        "episodes": _pack(collection.episodes),
        "greedy": _pack(list(collection.greedy.values())),
        "batch": {name: getattr(replace(batch, records=rows), name) for name in _BATCH},
    }
    target = dump_folder(run, step)
    try:
        with replacing(target) as scratch:
            scratch.mkdir(parents=True)
            save_state(scratch, _FILE, tree)
            shutil.rmtree(target, ignore_errors=True)  # of an attempt that ended before its next checkpoint
    except SafetensorError as error:
        raise OSError(str(error)) from error
    for old in dumped_steps(run):
        weights = weights_folder(run, old)
        if old != step and weights is not None and not weights.is_dir():
            shutil.rmtree(dump_folder(run, old))


def read_dump(run: Path, step: int) -> Dump:
    """Read what `write_dump` wrote.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    folder = dump_folder(run, step)
    if not folder.is_dir():
        there = ", ".join(map(str, dumped_steps(run))) or "none"
        raise CheckpointError(f"{run}: no dump of step {step}; there are: {there}. rollout.dump=true writes them.")
    from embodyrl.checkpoint.tensors import load_state

    tree = load_state(folder, _FILE)
    greedy = {e.spec.group_id: e for e in _unpack(tree["greedy"], kept=False)}
    collection = RolloutResult(episodes=_unpack(tree["episodes"], kept=True), greedy=greedy)
    return Dump(step=step, fields=tree["fields"], collection=collection, batch=PreparedBatch(**tree["batch"]))


def _pack(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Episodes as a few arrays: [E, ...], and those of their chunks one after the other."""
    arrays: dict[str, Any] = {name: [getattr(e, name) for e in episodes] for name in _FLAGS}
    if episodes:
        arrays |= {name: np.concatenate([getattr(e, name) for e in episodes]) for name in _PER_CHUNK}
    return arrays | {
        "spec": [_numbers(e.spec) for e in episodes],
        "chunks": [len(e.valid) for e in episodes],
        "bootstrap_value": [e.bootstrap_value for e in episodes],
        "began": [_numbers(e.earlier.spec) if e.earlier else _NOT_EARLIER for e in episodes],
    }


def _numbers(spec: EpisodeSpec) -> list[int]:
    return [int(getattr(spec, name)) for name in _SPEC]


def _unpack(packed: dict[str, Any], *, kept: bool) -> list[Episode]:
    """The inverse of `_pack`; `kept`: their records are the rows of the dump."""
    episodes, start = [], 0
    for i, (spec, count) in enumerate(zip(packed["spec"], packed["chunks"], strict=True)):
        rows = np.arange(start, start + count)
        start += count
        # Dumps of earlier versions do not say it; of what came before, the algorithms ask whose it was.
        began = packed.get("began", [_NOT_EARLIER] * len(packed["spec"]))[i]
        earlier = EarlierPart(EpisodeSpec(**dict(zip(_SPEC, began, strict=True))), 0, 0.0, False)
        episodes.append(
            Episode(
                spec=EpisodeSpec(**dict(zip(_SPEC, spec, strict=True))),
                records=rows if kept else rows[:0],
                earlier=earlier if earlier.spec.episode_id >= 0 else None,
                **{name: packed[name][rows] for name in _PER_CHUNK},
                **{name: packed[name][i] for name in (*_FLAGS, "bootstrap_value")},
            )
        )
    return episodes
