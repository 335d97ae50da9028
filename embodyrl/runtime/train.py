"""Training: the loop, and what surrounds it (run folder, validation, checkpoints, signals)."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embodyrl import __version__
from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.config.schema import Config
from embodyrl.errors import CheckpointError, Interrupted
from embodyrl.files import write_atomically
from embodyrl.monitor import Fanout, RunInfo, build_monitor
from embodyrl.runtime.actors import Actors
from embodyrl.runtime.build import Blueprint, Crew, draw_blueprint, start_crew
from embodyrl.runtime.episodes import train_plan
from embodyrl.runtime.evaluation import EvalResult, run_evaluation
from embodyrl.runtime.metrics import rollout_metrics, settle
from embodyrl.runtime.outcome import changes, compare_recordings
from embodyrl.runtime.planning import facts
from embodyrl.runtime.rundir import RunFolder, open_run, resolve_weights
from embodyrl.types import PreparedBatch

LOOP_FILE = "loop.json"
_NOTHING = PreparedBatch(
    records=np.zeros(0, np.int64),
    episode=np.zeros(0, np.int64),
    advantage=np.zeros((0, 0), np.float32),
    returns=np.zeros((0, 0), np.float32),
    valid=np.zeros((0, 0), np.bool_),
    has_signal=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a finished training leaves."""

    run: Path
    step: int
    checkpoint: Path
    first: EvalResult | None
    last: EvalResult | None


def train(cfg: Config, *, overrides: Sequence[str] = (), resume: Path | None = None) -> TrainResult:
    """Train from `cfg`, or continue the run in `resume`.

    Raises:
        EmbodyError: every failure that has a cause to name; its `exit_code` is the process's.
    """
    blueprint = draw_blueprint(cfg, training=True)
    weights = resolve_weights(cfg.ckpt) if cfg.ckpt else None
    folder = open_run(cfg, "train", overrides, resume)
    try:
        return _Training(blueprint, folder, weights).run()
    finally:
        folder.unlock()


class _Training:
    """One process's share of a run."""

    def __init__(self, blueprint: Blueprint, folder: RunFolder, weights: Path | None) -> None:
        self.blueprint = blueprint
        self.cfg = blueprint.cfg
        self.folder = folder
        self.weights = weights
        self.store = CheckpointStore(folder.checkpoints)
        self.store.clean_stale()
        self.step = 0
        self.best = -1.0
        self.best_step: int | None = None
        self.first: EvalResult | None = None
        self.last: EvalResult | None = None
        self.monitor: Fanout = build_monitor(self.cfg.runner.logger.backends)

    def run(self) -> TrainResult:
        start = self._find_start()
        self._open_monitor(resumed=start is not None)
        try:
            crew = start_crew(self.blueprint, self.folder.logs, self.monitor.text, start_from=self.weights)
            try:
                with crew.fleet.signals():
                    return self._train(crew, start)
            finally:
                crew.close()
        finally:
            self.monitor.close()

    def _train(self, crew: Crew, start: Path | None) -> TrainResult:
        assert self.blueprint.algorithm is not None
        actors = Actors(crew.policy, crew.arena, self.blueprint.algorithm)
        try:
            if start is not None:
                actors.load(start)
            if self.step == 0 and self._validates:
                self.first = self._validate(crew)
                self.monitor.log(0, self.first.metrics())
            self._loop(crew, actors)
            with crew.fleet.shield():
                checkpoint = self._save(actors)
        except Interrupted as interruption:
            with crew.fleet.shield():
                saved = self._save(actors)
            raise self._farewell(interruption, saved) from None
        self._report(checkpoint)
        return TrainResult(
            run=self.folder.root, step=self.step, checkpoint=checkpoint, first=self.first, last=self.last
        )

    def _loop(self, crew: Crew, actors: Actors) -> None:
        """Rollout, score, advantages, update, log, save: the order in which data flows."""
        algorithm = self.blueprint.algorithm
        assert algorithm is not None
        for step in range(self.step, self.blueprint.total_steps):
            started = time.perf_counter()
            plan = train_plan(self.cfg, self.blueprint.env, step, counts_chunk_steps=algorithm.counts_chunk_steps)
            total = plan.num_slots * len(plan.waves) if algorithm.counts_chunk_steps else plan.num_episodes
            done = [0]

            def note(_: object, done: list[int] = done, total: int = total) -> None:
                done[0] += 1
                self.monitor.progress(min(done[0], total), total, "rollout")

            rollout = crew.rollouts.collect(plan, version=step, on_episode=note)
            with crew.fleet.shield():
                actors.score(rollout)
                # All episodes may have been lost to crashed env workers.
                batch = algorithm.prepare(rollout.episodes) if rollout.episodes else _NOTHING
                result = actors.update(step, rollout, batch)
                crew.rollouts.release(rollout)
                self.step = step + 1
            metrics = rollout_metrics(rollout, num_workers=len(self.blueprint.seats), restarts=crew.fleet.restarts)
            metrics |= batch.metrics
            metrics["time/update"] = result.pop("seconds")
            metrics |= {f"actor/{name}": value for name, value in result.items()}
            metrics["time/step"] = time.perf_counter() - started
            try:
                if self._validates and self._due(self.cfg.runner.val_check_interval):
                    self.last = self._validate(crew)
                    metrics |= self.last.metrics() | {"time/validate": self.last.wall_s}
            finally:
                # The step is done and will not be repeated, even if its validation was interrupted.
                self.monitor.log(self.step, settle(metrics, deterministic=self.cfg.runner.deterministic))
            if not batch.has_signal:
                self.monitor.text(f"step {self.step}: no group has a signal, the weights stay as they are")
            if self._due(self.cfg.runner.save_interval) and self.step < self.blueprint.total_steps:
                with crew.fleet.shield():
                    self._save(actors)

    @property
    def _validates(self) -> bool:
        return self.cfg.runner.val_check_interval != -1

    def _due(self, interval: int) -> bool:
        last = self.step == self.blueprint.total_steps
        return last or (interval > 0 and self.step % interval == 0)

    def _validate(self, crew: Crew) -> EvalResult:
        result = run_evaluation(
            self.blueprint,
            crew,
            folder=self.folder.eval_folder(self.step),
            videos=self.folder.videos,
            step=self.step,
            progress=self.monitor.progress,
            warn=self.monitor.text,
        )
        for path in result.videos:
            self.monitor.video(self.step, Path(path))
        if result.overall.success_once > self.best:
            self.best, self.best_step = result.overall.success_once, self.step
        return result

    def _save(self, actors: Actors) -> Path:
        """Write a checkpoint of the current step, once, and drop old ones."""
        existing = self.folder.checkpoints / f"step_{self.step:06d}"
        if existing.is_dir():
            return existing
        loop = {"step": self.step, "best": self.best, "best_step": self.best_step, "version": __version__}

        def fill(folder: Path) -> None:
            actors.save(folder)
            write_atomically(folder / LOOP_FILE, json.dumps(loop, indent=2) + "\n")

        path = self.store.write(self.step, fill, {"env": self.blueprint.env.name, "model": self.blueprint.policy.name})
        protect = [self.best_step] if self.cfg.checkpoint.keep_best and self.best_step is not None else []
        self.store.prune(self.cfg.checkpoint.keep, protect)
        return path

    def _find_start(self) -> Path | None:
        """Find the newest complete checkpoint of a resumed run.

        Raises:
            CheckpointError: the newest checkpoint is damaged; older ones are never taken silently.
        """
        latest = self.store.latest()
        if latest is None:
            return None
        self.store.verify(latest)
        try:
            loop = json.loads((latest / LOOP_FILE).read_text(encoding="utf-8"))
            self.step, self.best, self.best_step = int(loop["step"]), float(loop["best"]), loop["best_step"]
        except (OSError, KeyError, ValueError) as error:
            raise CheckpointError(f"{latest / LOOP_FILE} is not usable: {error}.") from error
        self.weights = None  # the checkpoint's own weights win
        return latest

    def _open_monitor(self, *, resumed: bool) -> None:
        lines = facts(self.blueprint)
        resume_step = (self.step + 1 if self.step else 0) if resumed else None
        info = RunInfo(
            run_id=self.folder.run_id,
            project=self.cfg.runner.logger.project_name,
            total_steps=self.blueprint.total_steps,
            resume_step=resume_step,
            summary=dict(lines),
        )
        self.monitor.open(self.folder.root, info)
        head = f"embodyrl {__version__} · train · {self.folder.run_id} · seed {self.cfg.seed}"
        if resumed:
            head += f" · resumed at step {self.step}"
        validation = "" if self._validates else " · no validation (runner.val_check_interval=10 turns it on)"
        lines += [("output", f"{self.folder.root}{validation}"), ("logs", f"tail -F {self.folder.logs}/*.log")]
        self.monitor.banner([head, *(f"  {name:<10} {text}" for name, text in lines)])

    def _farewell(self, interruption: Interrupted, saved: Path) -> Interrupted:
        name = signal.Signals(interruption.signum).name
        interruption.args = (
            f"stopped by {name} after step {self.step}; saved {saved}; "
            f"go on with: embodyrl train --resume {self.folder.root}",
        )
        return interruption

    def _report(self, checkpoint: Path) -> None:
        videos: list[Path] = []
        if self.first is not None and self.last is not None:
            self.monitor.results(changes(self.first, self.last))
            videos = compare_recordings(
                self.first,
                self.last,
                self.folder.videos,
                steps=(0, self.step),
                fps=self.cfg.video_cfg.fps,
                warn=self.monitor.text,
            )
        self.monitor.text(f"run        {self.folder.root}")
        self.monitor.text(f"checkpoint {checkpoint}")
        for path in videos[:4] or (self.last.videos[:4] if self.last is not None else ()):
            self.monitor.text(f"video      {path}")
