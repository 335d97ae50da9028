"""Env workers: reported times, filled records and recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from toy_runs import toy_config

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import STEP_RESULT, Record
from embodyrl.channels.messages import EnvReport, EnvRequest, ResetRequest
from embodyrl.envs.video import VideoSettings
from embodyrl.plan.build import build_run_plan
from embodyrl.types import EpisodeStart
from embodyrl.workers import env_worker


def test_render_time_is_excluded_from_simulation_time(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is one second later: rendering takes one second, simulation the rest."""
    run_plan = build_run_plan(toy_config(tmp_path), training=True)
    arena = Arena.create(run_plan.layout, 8)
    init = env_worker.EnvWorkerInit(
        env=run_plan.cfg.env,
        context=replace(run_plan.context, num_envs=2),
        video=run_plan.cfg.video_cfg,
        arena=arena.handle,
        shared_arena=arena,
    )
    worker = env_worker.EnvWorker(init)
    try:
        first, *targets = arena.allocate_all(4).tolist()
        starts = [EpisodeStart(reset_id=env_index, seed=0, max_episode_steps=8) for env_index in range(2)]
        begin = [ResetRequest(env_index=env_index, start=start, target=0) for env_index, start in enumerate(starts)]
        (_,) = worker.handle(EnvRequest(sequence=0, stage=0, resets=(replace(begin[0], target=first),)))
        arena[Record.action][:] = 0.0
        clock = count()
        monkeypatch.setattr(env_worker, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
        step = {"env_indices": [0], "sources": np.array([first]), "targets": np.array(targets[:1])}
        (report,) = worker.handle(
            EnvRequest(sequence=1, stage=0, **step, resets=(replace(begin[1], target=targets[1]),))
        )
    finally:
        worker.close()
        arena.close()
    assert isinstance(report, EnvReport)
    # Begun at 0, drawn from 1 to 2, stepped at 3, drawn from 4 to 5, ended at 6.
    assert (report.sim_s, report.render_s, report.reset_s) == (2.0, 2.0, 2.0)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., tuple[env_worker.EnvWorker, Arena]]]:
    """Start an env worker of the toy environment with one environment, whose records contain ones."""
    run_plan = build_run_plan(toy_config(tmp_path, "env.kwargs.goal=99"), training=True)
    opened: list[env_worker.EnvWorker] = []

    def begin(**init: bool) -> tuple[env_worker.EnvWorker, Arena]:
        arena = Arena.create(run_plan.layout, 32)
        for name in STEP_RESULT:
            arena[name][:] = 1
        arena[Record.action][:] = 0.0
        opened.append(
            env_worker.EnvWorker(
                env_worker.EnvWorkerInit(
                    env=run_plan.cfg.env,
                    context=run_plan.context,
                    video=VideoSettings(),
                    arena=arena.handle,
                    shared_arena=arena,
                    **init,
                )
            )
        )
        return opened[-1], arena

    yield begin
    for worker in opened:
        worker.close()
        worker._arena.close()


def reset(worker: env_worker.EnvWorker, arena: Arena, *, steps: int, video: Path | None = None) -> int:
    """Start an episode; return the reference to the record of its first observation."""
    (record_ref,) = arena.allocate_all(1).tolist()
    begun = EpisodeStart(reset_id=0, seed=0, max_episode_steps=steps)
    stem = None if video is None else str(video)
    (_,) = worker.handle(
        EnvRequest(
            sequence=0, stage=0, resets=(ResetRequest(env_index=0, start=begun, target=record_ref, video_stem=stem),)
        )
    )
    return record_ref


def step(worker: env_worker.EnvWorker, arena: Arena, source: int) -> tuple[int, EnvReport]:
    """Execute the chunk of a record; return the reference to the record of the next observation."""
    (target,) = arena.allocate_all(1).tolist()
    request = EnvRequest(sequence=1, stage=0, env_indices=[0], sources=np.array([source]), targets=np.array([target]))
    (report,) = worker.handle(request)
    return target, report


def test_single_step_chunks_clear_the_remaining_record(start) -> None:
    worker, arena = start(single_step=True)
    record_ref = reset(worker, arena, steps=8)
    (record,) = arena.read([record_ref])
    step(worker, arena, record_ref)
    assert arena[Record.valid][record].tolist() == [True, False, False, False]
    for name in STEP_RESULT:
        assert not arena[name][record, 1:].any(), name


def test_video_of_an_unfinished_episode_is_discarded(start, tmp_path) -> None:
    """The environment is reset during a recording; later frames belong to another episode."""
    worker, arena = start()
    record_ref = reset(worker, arena, steps=8, video=tmp_path / "first")
    _, report = step(worker, arena, record_ref)
    assert report.recordings == ()
    record_ref = reset(worker, arena, steps=4)
    _, report = step(worker, arena, record_ref)
    assert report.recordings == ()
    assert not [*tmp_path.glob("*.mp4")]
