"""Storage of a run's episodes as a data set (`runner.keep_episodes`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.channels.arena import Arena
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.settings import KeptEpisodes

if TYPE_CHECKING:
    from embodyrl.commands.episode_writer import EpisodeDatasetWriter

EPISODES_FOLDER = "episodes"


def stores_episodes(run_plan: RunPlan) -> bool:
    """Return True if the run stores episodes (`runner.keep_episodes` is not none).

    Raises:
        ConfigError: the episodes of this run cannot be stored.
    """
    cfg = run_plan.cfg
    if cfg.runner.keep_episodes is KeptEpisodes.none:
        return False
    from embodyrl.commands.episode_writer import check_episodes  # imports pyarrow

    check_episodes(run_plan)
    return True


def with_every_step(run_plan: RunPlan) -> RunPlan:
    """Return a copy of the plan with one record per env step, and arena space for one episode per environment."""
    capacity = run_plan.num_envs * (run_plan.cfg.env.eval.max_episode_steps + 2)
    return replace(run_plan, single_step=True, capacity=capacity)


@contextmanager
def open_writer(
    run_plan: RunPlan, arena: Arena, run: Path, write_line: Callable[[str], None]
) -> Iterator[EpisodeDatasetWriter | None]:
    """Open the writer of a run's episodes, and close it after the block; yield None if the run stores no episodes."""
    if not stores_episodes(run_plan):
        yield None
        return
    from embodyrl.commands.episode_writer import EpisodeDatasetWriter

    writer = EpisodeDatasetWriter(run_plan, arena, run / EPISODES_FOLDER, write_line)
    try:
        yield writer
    finally:
        writer.close()
