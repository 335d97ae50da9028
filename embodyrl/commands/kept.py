"""Storage of a run's episodes as a data set (`runner.keep_episodes`) by a writer of an extension."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from embodyrl.channels.arena import Arena
from embodyrl.errors import ConfigError
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.settings import KeptEpisodes
from embodyrl.registry import Registry, has
from embodyrl.types import Episode

EPISODES_FOLDER = "episodes"


class EpisodeWriter(Protocol):
    """Interface of a writer of finished episodes, whose records are still in the arena."""

    def add(self, episodes: Sequence[Episode], step: int) -> None:
        """Store the episodes that `runner.keep_episodes` selects; `step`: training step of the weights that acted."""
        ...

    def close(self) -> None:
        """Finish the data set and close its files."""
        ...


class EpisodeKeeper(Protocol):
    """Interface of an extension that opens episode writers."""

    def check(self, run_plan: RunPlan) -> None:
        """Raise ConfigError if the episodes of this run cannot be stored."""
        ...

    def open(self, run_plan: RunPlan, arena: Arena, folder: Path, say: Callable[[str], None]) -> EpisodeWriter:
        """Open a writer that stores the episodes of a run in `folder`; `say` prints one line."""
        ...


EPISODE_WRITERS: Registry[EpisodeKeeper] = Registry(
    "episode writer", group="embodyrl.episode_writers", wants="an EpisodeKeeper", fits=has("check", "open")
)


def keeps_episodes(run_plan: RunPlan) -> bool:
    """Return True if the run stores episodes (`runner.keep_episodes` is not none).

    Raises:
        ConfigError: the episodes of this run cannot be stored.
    """
    cfg = run_plan.cfg
    if cfg.runner.keep_episodes is KeptEpisodes.none:
        return False
    for keeper in EPISODE_WRITERS.every():
        keeper.check(run_plan)
        return True
    raise ConfigError("runner.keep_episodes: the extension 'experience' is missing; reinstall embodyrl to get it.")


def with_every_step(run_plan: RunPlan) -> RunPlan:
    """Return a copy of the plan with one record per env step, and arena space for one episode per slot."""
    capacity = run_plan.num_slots * (run_plan.cfg.env.eval.max_episode_steps + 2)
    return replace(run_plan, single_step=True, capacity=capacity)


@contextmanager
def open_writer(
    run_plan: RunPlan, arena: Arena, run: Path, say: Callable[[str], None]
) -> Iterator[EpisodeWriter | None]:
    """Open the writer of a run's episodes, and close it after the block; yield None if the run stores no episodes."""
    if not keeps_episodes(run_plan):
        yield None
        return
    keeper = next(iter(EPISODE_WRITERS.every()))
    writer = keeper.open(run_plan, arena, run / EPISODES_FOLDER, say)
    try:
        yield writer
    finally:
        writer.close()
