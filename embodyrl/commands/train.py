"""Command `train`: the training loop with validation, checkpoints and signals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.commands.banner import evaluation_banner_lines, require_disk, start_banner_lines
from embodyrl.commands.before_after import record_changes
from embodyrl.commands.collapse import build_collapse_check
from embodyrl.commands.episode_storage import EpisodeDatasetWriter, open_writer, stores_episodes
from embodyrl.commands.eval_result import EvalResult, build_result_table
from embodyrl.commands.evaluate import read_evaluation, run_evaluation
from embodyrl.commands.metrics import rollout_metrics, split_clock_metrics
from embodyrl.commands.run_folder import RunFolder, check_resumed, open_run, resolve_initial_weights
from embodyrl.commands.session import OnStep, Session
from embodyrl.config.compose import format_override
from embodyrl.config.trust import trust_overrides
from embodyrl.errors import EmbodyError
from embodyrl.monitor.history import METRICS_FILE, read_rows
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.episodes import greedy_episodes, groups_per_step, refill_episodes, train_episodes
from embodyrl.plan.memory_limits import require_resources
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.schema import Config
from embodyrl.plan.task_weights import has_task_weights, record_outcomes
from embodyrl.reports.paired import PairedComparison
from embodyrl.scheduler.event_loop import Actors
from embodyrl.scheduler.rollout import Rollout, RolloutResult
from embodyrl.scheduler.start import RolloutWorkers, start_workers
from embodyrl.types import Episode, PreparedBatch

_EMPTY_BATCH = PreparedBatch(
    records=np.zeros(0, np.int64),
    episode=np.zeros(0, np.int64),
    advantage=np.zeros((0, 0), np.float32),
    returns=np.zeros((0, 0), np.float32),
    valid=np.zeros((0, 0), np.bool_),
    has_signal=False,
)


OnEval = Callable[[int, EvalResult], bool | None]
"""Callback with the number of completed steps and the result of a validation; True ends the run as in `OnStep`."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrainResult:
    """Result of a finished training run."""

    run: Path
    step: int
    checkpoint: Path
    first_eval: EvalResult | None
    last_eval: EvalResult | None

    def __repr__(self) -> str:
        scores = [str(result.overall.score) for result in (self.first_eval, self.last_eval) if result is not None]
        return f"TrainResult({self.run}, step {self.step}{', ' if scores else ''}{' -> '.join(scores)})"


def train(
    cfg: Config,
    *,
    overrides: Sequence[str] = (),
    resume: Path | None = None,
    on_step: OnStep | None = None,
    on_eval: OnEval | None = None,
) -> TrainResult:
    """Train with `cfg`, or resume the run in `resume`; a callback ends the run by returning True.

    Raises:
        EmbodyError: any failure with a known cause; its `exit_code` is the exit code of the process.
    """
    run_plan = build_run_plan(cfg, training=True)
    stores_episodes(run_plan)  # raises if episodes cannot be stored
    require_resources(run_plan)
    require_disk(cfg, run_plan.memory.checkpoint, run_plan.total_steps)
    weights = resolve_initial_weights(cfg, run_plan.env)
    if resume is not None:
        check_resumed(cfg, run_plan.env, resume)
    with open_run(cfg, "train", overrides, resume) as folder:
        return _Training(run_plan, folder, weights, on_step, on_eval).run()


@dataclass
class _Training:
    """State of a training run in this process."""

    run_plan: RunPlan
    folder: RunFolder
    weights: Path | None
    on_step: OnStep | None
    on_eval: OnEval | None
    first_eval: EvalResult | None = None
    last_eval: EvalResult | None = None
    paired: tuple[PairedComparison, ...] = ()
    """Paired test of the first and the last validation for each suite."""

    def __post_init__(self) -> None:
        assert self.run_plan.algorithm is not None
        self.algorithm, self.cfg = self.run_plan.algorithm, self.run_plan.cfg
        self.session = Session(self.cfg, self.folder, "train")
        self.monitor = self.session.monitor
        self.reported_errors: set[str] = set()
        self.collapse_check = build_collapse_check(self.run_plan.env)

    def run(self) -> TrainResult:
        session, folder = self.session, self.session.folder
        start = session.restore_newest_checkpoint()
        no_validation = [("validation", "none (runner.val_check_interval=10 enables it)")]
        lines = [
            ("run", str(folder.root)),
            *start_banner_lines(self.run_plan, self.weights),
            *(evaluation_banner_lines(self.run_plan) if self._validates else no_validation),
            folder.log_command,
        ]
        session.print_banner(lines, self.run_plan.total_steps, self.run_plan.env.tasks)
        # A resumed run also loads the initial weights, for the reference; the actor then loads the checkpoint.
        start_all = partial(
            start_workers,
            self.run_plan,
            folder.logs,
            self.monitor.text,
            start_from=self.weights,
            progress=self.monitor.progress,
        )
        with session.running(start_all) as workers:
            return self._train(workers, start)

    def _train(self, workers: RolloutWorkers, start: Path | None) -> TrainResult:
        actors = Actors(workers.scheduler, workers.arena, self.algorithm, self.run_plan)

        def save() -> Path:
            workers.scheduler.abandon()  # episodes of steps that will not run
            return self._save(workers, actors)

        with self.session.save_on_interrupt(save):
            if start is not None:
                actors.load(start)
            workers.scheduler.publish(self.session.step)
            for row in read_rows(self.session.folder.root / METRICS_FILE):
                self.collapse_check.check(row.get("step", 0), row)  # earlier steps of a resumed run
            self._validate_initial_weights(workers)
            with open_writer(self.run_plan, workers.arena, self.session.folder.root, self.monitor.text) as writer:
                self._loop(workers, actors, writer)
            checkpoint = save()
            self.session.wait_for_save()
            self._compare(workers)
        self._report(checkpoint)
        return TrainResult(
            run=self.session.folder.root,
            step=self.session.step,
            checkpoint=checkpoint,
            first_eval=self.first_eval,
            last_eval=self.last_eval,
        )

    def _validate_initial_weights(self, workers: RolloutWorkers) -> None:
        """Validate the initial weights; in a resumed run, read the result of the first validation instead."""
        folder, env = self.session.folder, self.run_plan.env
        if self.session.step == 0 and self._validates:
            self.first_eval = self._validate(workers)
            self.monitor.log(0, self.first_eval.metrics())
        elif self._validates:
            eval_steps = [step for step in range(self.session.step + 1) if folder.eval_folder(step).is_dir()]
            self.first_eval = read_evaluation(folder.eval_folder(0), env)
            self.last_eval = read_evaluation(folder.eval_folder(eval_steps[-1]), env) if eval_steps[1:] else None
            if row := self.session.interrupted_validation_metrics(self.cfg.runner.val_check_interval):
                self.last_eval = self._validate(workers)
                row |= self.last_eval.metrics() | {"time/validate": self.last_eval.wall_s}
                self.monitor.log(self.session.step, row)

    def _compare(self, workers: RolloutWorkers) -> None:
        if self.first_eval is None or self.last_eval is None:
            return
        try:
            videos = self.session.folder.videos
            changes = record_changes(self.run_plan, workers, self.first_eval, self.last_eval, videos, self.monitor)
        except OSError as error:  # the checkpoint is already saved
            self.monitor.text(f"warning: videos of the first and last validation cannot be written: {error}")
            return
        self.first_eval, self.last_eval, self.paired = changes
        for path in (*self.first_eval.videos, *self.last_eval.videos):
            self.monitor.video(self.session.step, Path(path))

    def _loop(self, workers: RolloutWorkers, actors: Actors, writer: EpisodeDatasetWriter | None) -> None:
        """Run the training steps: rollout, reference log-probabilities, advantages, update, logging, checkpoint."""
        session, algorithm = self.session, self.algorithm
        sampler = StepRollouts(self.run_plan, workers, algorithm)
        while (step := session.step) < session.total:
            started = time.perf_counter()
            workers.timeline.begin()
            rollout = sampler.collect(step, lambda done, total: self.monitor.progress(done, total, "rollout"))
            self._check_rewards(rollout, workers, actors)
            if writer is not None:
                writer.add(rollout.episodes, step)
            with workers.supervisor.defer_signals():
                if self.cfg.algorithm.curriculum:
                    episodes = [*rollout.episodes, *rollout.filtered]
                    by_task = has_task_weights(self.run_plan.env, self.cfg.env.train)
                    record_outcomes(algorithm.task_outcomes, episodes, by_task=by_task)
                # Before the update, so that simulators reset while the weights change.
                if not self._validates_after(step):
                    sampler.queue_next(step + 1)
                scores = actors.score(rollout)
                # All episodes may have been lost to crashed env workers.
                batch = algorithm.prepare(rollout.episodes, scores) if rollout.episodes else _EMPTY_BATCH
                self.monitor.progress(0, 0, "update")
                result = actors.update(step, rollout, batch)
                # Released after the update, which reads these records.
                workers.scheduler.release(rollout)
                # Set before publishing, because the version of the weights is their number of updates.
                session.step = step + 1
                published = time.perf_counter()
                workers.scheduler.publish(session.step)
                publish_s = time.perf_counter() - published
            restarts = session.restarts + workers.supervisor.restarts
            metrics = rollout_metrics(rollout, self.run_plan.env, len(self.run_plan.env_workers), restarts)
            metrics |= workers.timeline.metrics() | batch.metrics
            metrics |= {"time/update": result.pop("seconds"), "time/publish": publish_s}
            metrics |= {f"actor/{name}": value for name, value in result.items()}
            metrics["time/step"] = time.perf_counter() - started
            try:
                if session.is_due(self.cfg.runner.val_check_interval):
                    self.last_eval = self._validate(workers)
                    metrics |= self.last_eval.metrics() | {"time/validate": self.last_eval.wall_s}
            finally:
                # The step is done and will not be repeated, even if its validation was interrupted.
                deterministic = self.cfg.runner.deterministic
                self.monitor.log(session.step, split_clock_metrics(metrics) if deterministic else metrics)
            for line in self.collapse_check.check(session.step, metrics):
                self.monitor.text(line)
            session.run_callback(self.on_step, metrics)
            if not batch.has_signal:
                self.monitor.text(f"step {session.step}: no group has a learning signal; the weights are unchanged")
            session.save_if_due(lambda: self._save(workers, actors))

    def _check_rewards(self, rollout: RolloutResult, workers: RolloutWorkers, actors: Actors) -> None:
        try:
            rollout.report_reward_errors(self.monitor.text, self.reported_errors)
        except EmbodyError:
            if self.session.step:
                self._save(workers, actors)
                self.session.wait_for_save()
            raise

    @property
    def _validates(self) -> bool:
        return self.cfg.runner.val_check_interval != -1

    def _validates_after(self, step: int) -> bool:
        """Return True if a validation follows this step, so that no episode may continue into the next step."""
        interval = self.cfg.runner.val_check_interval
        return step + 1 == self.session.total or (interval != -1 and (step + 1) % interval == 0)

    def _validate(self, workers: RolloutWorkers) -> EvalResult:
        session = self.session
        result = run_evaluation(self.run_plan, workers, session.folder, self.monitor, session.step)
        if result.dropped:
            self.monitor.text(f"step {session.step}: {result.dropped_warning}")
        for path in result.videos:
            self.monitor.video(session.step, Path(path))
        if result.videos:
            self.monitor.text(f"step {session.step}: {len(result.videos)} recordings in {session.folder.videos}")
        session.record_score(result.overall.success_once or 0.0, result.overall.mean_return)
        session.run_callback(self.on_eval, result)
        return result

    def _save(self, workers: RolloutWorkers, actors: Actors) -> Path:
        with workers.supervisor.defer_signals():
            meta = {"env": self.run_plan.env.name, "model": self.run_plan.policy.name}
            return self.session.save(actors.save, meta)

    def _report(self, checkpoint: Path) -> None:
        if self.first_eval is not None and self.last_eval is not None:
            self.monitor.results(*build_result_table(self.first_eval, self.last_eval, self.paired))
            before, after = self.first_eval.overall, self.last_eval.overall
            if after.success_once not in (None, after.mean_return):
                self.monitor.text(f"mean return: {before.mean_return:.4g} before, {after.mean_return:.4g} after")
        root, trust = str(self.session.folder.root), trust_overrides(self.cfg)
        commands = [["report", root, "--open"], ["eval", format_override("ckpt", root), *trust], ["play", root, *trust]]
        commands = commands if self.run_plan.env.simulator.renders else commands[:2]
        videos = [path for result in (self.first_eval, self.last_eval) if result is not None for path in result.videos]
        where = f"{Path(videos[0]).parent} ({len(videos)})" if videos else ""
        self.session.print_summary(checkpoint, *commands, more=[("videos", where)] if videos else ())


class StepRollouts:
    """Rollouts of the current training step and of later training steps.

    The staleness rule of arXiv 2505.24298 is applied to fixed lists of episodes: the episodes of training step `s`
    start once the weights have version `s - algorithm.max_staleness`; with 0, all data of an update come from its own
    weights. An episode that is running while weights change continues with the new weights; each of its chunks keeps
    the version and log-probabilities of the weights that sampled it.
    """

    def __init__(self, run_plan: RunPlan, workers: RolloutWorkers, algorithm: Algorithm) -> None:
        self._run_plan = run_plan
        self._cfg = run_plan.cfg
        self._scheduler = workers.scheduler
        self._algorithm = algorithm
        self._rollouts: dict[int, Rollout] = {}
        self._max_staleness = self._cfg.algorithm.max_staleness

    def collect(self, step: int, progress: Callable[[int, int], None]) -> RolloutResult:
        """Finish the rollout of a step. Call `progress(finished, total)` after each episode."""
        self._open_rollouts(step, step + self._max_staleness)
        rollout = self._rollouts.pop(step)
        # `on_episode` has no reference to the rollout: a reference cycle would keep rollouts of many steps in memory.
        total, result = rollout.plan.expected, rollout.out

        def on_episode(_: Episode) -> None:
            progress(min(len(result.episodes), total), total)

        rollout.on_episode = on_episode
        collection = self._scheduler.finish(rollout)
        if self._algorithm.estimator.needs_greedy:
            # Greedy episodes need no records, because only their returns are used.
            greedy_result = self._scheduler.collect(
                Rollout(greedy_episodes(self._cfg, rollout.plan), greedy=True, keep=False)
            )
            collection.greedy = {episode.spec.group_id: episode for episode in greedy_result.episodes}
            collection.stats.add(greedy_result.stats)
        for attempt in range(self._algorithm.filter_refills):
            selected = [collection.episodes[index] for index in self._algorithm.select(collection.episodes)]
            num_missing = groups_per_step(self._cfg) - len({episode.spec.group_id for episode in selected})
            if num_missing <= 0:
                break
            self._refill(step, attempt, num_missing, collection, selected)
        return collection

    def queue_next(self, step: int) -> None:
        """Queue the next rollouts: idle environments reset immediately, and inference waits for the new weights."""
        self._open_rollouts(step, min(step + self._max_staleness, self._run_plan.total_steps - 1))

    def _open_rollouts(self, first: int, last: int) -> None:
        algorithm, cfg = self._algorithm, self._cfg
        for step in range(first, min(last, self._run_plan.total_steps - 1) + 1):
            if step not in self._rollouts:
                counts = algorithm.estimator.counts_chunk_steps
                plan = train_episodes(
                    cfg, self._run_plan.env, step, counts_chunk_steps=counts, outcomes=algorithm.task_outcomes
                )
                continues = cfg.env.train.continue_episodes and counts
                rollout = Rollout(plan, min_version=step - self._max_staleness, continues=continues)
                self._rollouts[step] = self._scheduler.open(rollout)

    def _refill(
        self, step: int, attempt: int, num_missing: int, collection: RolloutResult, selected: list[Episode]
    ) -> None:
        """Run `num_missing` new groups to replace filtered groups; free the records of filtered episodes."""
        selected_ids = {episode.spec.episode_id for episode in selected}
        filtered = [episode for episode in collection.episodes if episode.spec.episode_id not in selected_ids]
        self._scheduler.release(collection, filtered)
        collection.filtered += filtered
        collection.episodes = list(selected)
        plan = refill_episodes(
            self._cfg, self._run_plan.env, step, attempt, num_missing, outcomes=self._algorithm.task_outcomes
        )
        refills = self._scheduler.collect(Rollout(plan))
        collection.episodes += refills.episodes
        # Episode ids of refills follow those of the step, so no id is used twice.
        collection.record_refs |= refills.record_refs
        collection.dropped += refills.dropped
        collection.reward_errors += refills.reward_errors
        collection.refills += num_missing
        collection.stats.add(refills.stats)
