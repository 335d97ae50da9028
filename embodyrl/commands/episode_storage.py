"""Storage of the episodes of a training or an evaluation as a data set (`runner.keep_episodes`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import Record
from embodyrl.commands.collect import copy_episode, write_environment
from embodyrl.commands.run_folder import EPISODES_FOLDER
from embodyrl.data.layout import OWN, Actor, Card
from embodyrl.data.writer import DatasetWriter
from embodyrl.errors import ConfigError
from embodyrl.plan.initial_states import get_selected_states
from embodyrl.plan.memory import plan_memory
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.settings import KeptEpisodes
from embodyrl.types import ActionKind, Episode

_IDS_PER_STEP = 10**6
"""Factor of the training step in an episode's unique number: training step * _IDS_PER_STEP + episode id."""


class EpisodeDatasetWriter:
    """Writes episodes to a data set until its size reaches `runner.keep_episodes_gb`.

    A resumed run does not write an episode twice.
    """

    def __init__(self, run_plan: RunPlan, arena: Arena, folder: Path, write_line: Callable[[str], None]) -> None:
        cfg = run_plan.cfg
        self._selection, self._limit = cfg.runner.keep_episodes, cfg.runner.keep_episodes_gb * 10**9
        self._arena, self._write_line = arena, write_line
        self._actor = Actor.expert if run_plan.policy.scripted else Actor.policy
        self._trained = cfg.is_train_command
        split = cfg.env.train if cfg.is_train_command else cfg.env.eval
        state_ids = get_selected_states(run_plan.env, split)
        collected = {"kept": self._selection.value, "state_ids": state_ids, "seed": cfg.seed}
        card = Card(env=run_plan.env, fps=cfg.video_cfg.fps, video=False, actors=True, collected=collected)
        self._writer = DatasetWriter(folder, card)
        write_environment(cfg, folder)
        self._stored_trials = {row[f"{OWN}trial"] for row in self._writer.episodes}
        self._bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        self._is_full = False
        # An upper bound: images count with their uncompressed size.
        self._frame_bytes = sum(arena[name][0].nbytes for name in (Record.images, Record.observed_state, Record.action))

    def add(self, episodes: Sequence[Episode], step: int) -> None:
        """Append episodes to the data set, except episodes that span two training steps."""
        for episode in episodes:
            trial = step * _IDS_PER_STEP + episode.spec.episode_id
            is_complete = not episode.cut and episode.earlier is None
            if self._is_full or not is_complete or trial in self._stored_trials or not self._is_selected(episode):
                continue
            size = episode.length * self._frame_bytes
            if self._bytes + size > self._limit:
                self._is_full = True
                self._write_line(
                    f"episodes   recording stopped: {self._writer.root} has reached runner.keep_episodes_gb"
                )
                continue
            self._stored_trials.add(trial)
            version = int(self._arena[Record.version][episode.records[0]]) if self._trained else step
            version = -1 if self._actor is Actor.expert else version
            self._writer.append(copy_episode(self._arena, episode, self._actor, trial=trial, version=version))
            self._bytes += size

    def _is_selected(self, episode: Episode) -> bool:
        keeps_successes = self._selection is KeptEpisodes.successes
        return self._selection is KeptEpisodes.all or episode.success_once is keeps_successes

    def close(self) -> None:
        """Write the episodes that are still in memory, and close the data set."""
        self._writer.flush()
        self._writer.close()


def stores_episodes(run_plan: RunPlan) -> bool:
    """Return True if the run stores episodes (`runner.keep_episodes` is not none).

    Raises:
        ConfigError: the episodes cannot be stored: a text task, a delay, or chunks of several actions in training.
    """
    cfg = run_plan.cfg
    if cfg.runner.keep_episodes is KeptEpisodes.none:
        return False
    if run_plan.env.action.kind is ActionKind.text:
        raise ConfigError("runner.keep_episodes: text tasks have no frames to record. Remove the key.")
    if cfg.env.delay[1]:
        raise ConfigError(
            "runner.keep_episodes stores one observation per env step, but with env.control.latency_steps actions are "
            "computed from older observations. Remove one of the keys."
        )
    if cfg.is_train_command and cfg.model.num_action_chunks > 1:
        raise ConfigError(
            f"runner.keep_episodes: training with model.num_action_chunks={cfg.model.num_action_chunks} stores one "
            "observation per chunk, but a data set needs one per env step. Use `embodyrl eval` or `collect` with the "
            "checkpoint, or model.num_action_chunks=1."
        )
    return True


def record_every_step(run_plan: RunPlan) -> RunPlan:
    """Return a copy of the plan with one record per env step and shared memory for one episode per environment."""
    capacity = run_plan.num_envs * (run_plan.cfg.env.eval.max_episode_steps + 2)
    run_plan = replace(run_plan, single_step=True, capacity=capacity)
    return replace(run_plan, memory=plan_memory(run_plan))


def open_writer(
    run_plan: RunPlan, arena: Arena, run: Path, write_line: Callable[[str], None]
) -> AbstractContextManager[EpisodeDatasetWriter | None]:
    """Open the writer of a run's episodes, which is closed after the block; None if the run stores no episodes."""
    if not stores_episodes(run_plan):
        return nullcontext()
    return closing(EpisodeDatasetWriter(run_plan, arena, run / EPISODES_FOLDER, write_line))
