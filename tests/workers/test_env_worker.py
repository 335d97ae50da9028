"""What an env worker reports of the time that it took."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from toy_runs import toy_config

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import Record
from embodyrl.channels.messages import EnvReport, EnvRequest, ResetRequest
from embodyrl.plan.blueprint import draw_blueprint
from embodyrl.types import EpisodeStart
from embodyrl.workers import env_worker


def test_drawing_is_no_part_of_simulating_and_resetting(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second later: drawing takes one, what lies around it the rest."""
    blueprint = draw_blueprint(toy_config(tmp_path), training=True)
    arena = Arena.create(blueprint.layout, 8)
    init = env_worker.EnvWorkerInit(
        env=blueprint.cfg.env,
        context=replace(blueprint.context, num_slots=2),
        video=blueprint.cfg.video_cfg,
        arena=arena.handle,
        shared_arena=arena,
    )
    worker = env_worker.EnvWorker(init)
    try:
        first, *targets = arena.allocate_all(4).tolist()
        starts = [EpisodeStart(reset_id=slot, seed=0, max_episode_steps=8) for slot in range(2)]
        begin = [ResetRequest(slot=slot, start=start, target=0) for slot, start in enumerate(starts)]
        (_,) = worker.handle(EnvRequest(sequence=0, stage=0, resets=(replace(begin[0], target=first),)))
        arena[Record.action][:] = 0.0
        clock = count()
        monkeypatch.setattr(env_worker, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
        step = {"slots": [0], "sources": np.array([first]), "targets": np.array(targets[:1])}
        (report,) = worker.handle(
            EnvRequest(sequence=1, stage=0, **step, resets=(replace(begin[1], target=targets[1]),))
        )
    finally:
        worker.close()
        arena.close()
    assert isinstance(report, EnvReport)
    # Begun at 0, drawn from 1 to 2, stepped at 3, drawn from 4 to 5, ended at 6.
    assert (report.sim_s, report.render_s, report.reset_s) == (2.0, 2.0, 2.0)
