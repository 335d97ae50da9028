"""SFT on demonstrations or text, which uses the same actor workers as RL."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from embodyrl.channels.arena import Arena
from embodyrl.channels.messages import POLICY_FOLDER, ImitateRequest, LoadRequest, SaveRequest
from embodyrl.cluster import LAUNCHERS
from embodyrl.cluster.protocol import OnNonfinite
from embodyrl.cluster.supervisor import Supervisor
from embodyrl.commands.run_folder import RunFolder, check_resumed, open_run
from embodyrl.commands.session import OnStep, Session
from embodyrl.commands.sft_data import action_log_std
from embodyrl.commands.sft_setup import SftInputs, augments_images, load_inputs, sft_banner_lines
from embodyrl.config.compose import format_override
from embodyrl.config.paths import resolve_asset
from embodyrl.config.trust import trust_overrides
from embodyrl.data.cards import read_card
from embodyrl.data.layout import ENVIRONMENT_PATH
from embodyrl.data.samples import Samples
from embodyrl.data.settings import DemonstrationSettings, Objective
from embodyrl.errors import EmbodyError
from embodyrl.files import available_cores
from embodyrl.plan.build import count_ranks, plan_devices
from embodyrl.plan.saved import ENVIRONMENT_FILE, START_FOLDER, read_saved
from embodyrl.plan.schema import Config
from embodyrl.plan.seeds import derive
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.scheduler.event_loop import EventLoop, PolicyClient
from embodyrl.scheduler.start import (
    Progress,
    RunningWorkers,
    build_actor_specs,
    get_num_threads,
    get_shared_arena,
    open_rendezvous,
)
from embodyrl.types import IntArray
from embodyrl.workers.lifecycle import PolicyHostInit

LOG_EVERY = 10
"""Number of optimizer steps per row of metrics."""
VALIDATION_SAMPLES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SftResult:
    """Result of a finished SFT run."""

    run: Path
    step: int
    checkpoint: Path
    metrics: dict[str, float]
    """Metrics of the last validation; empty without validation."""


def sft(
    cfg: Config, *, overrides: Sequence[str] = (), resume: Path | None = None, on_step: OnStep | None = None
) -> SftResult:
    """Train with `cfg`, or resume the run in `resume`; `on_step` runs after each optimizer step and may end the run.

    Raises:
        EmbodyError: any failure with a known cause; its `exit_code` is the exit code of the process.
    """
    banner_lines = sft_banner_lines(cfg)
    if resume is not None and isinstance(cfg.data, DemonstrationSettings):  # text data have no environment
        check_resumed(cfg, read_card(resolve_asset(str(cfg.data.path)), cfg.data).env, resume)
    command = "dagger" if cfg.command == "dagger" else "sft"
    with open_run(cfg, command, overrides, resume) as folder:
        return _Sft(cfg, folder, banner_lines, on_step).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class SftActors(RunningWorkers):
    """Running actor ranks of an SFT run; the driver passes samples through shared memory (the arena)."""

    loop: EventLoop

    def save(self, folder: Path) -> None:
        """Save the policy and the training state to `folder`."""
        self.loop.call(SaveRequest(folder=str(folder)))

    @contextmanager
    def write_samples(self, samples: Samples, rows: IntArray) -> Iterator[IntArray]:
        """Write the samples `rows` to arena records; yield their references, which are freed after the `with` block."""
        rows = (rows[:, None] * samples.steps_per_sample + np.arange(samples.steps_per_sample)).ravel()
        record_refs = self.arena.allocate_all(len(rows))
        # Written by the driver, which loads the data set: there is no env worker.
        with self.arena.write_all(record_refs) as records:
            for record, row in zip(records.tolist(), rows.tolist(), strict=True):
                samples.write(self.arena, record, row)
        yield record_refs
        self.arena.free(record_refs)


class _Sft:
    """SFT run in this process."""

    def __init__(
        self, cfg: Config, folder: RunFolder, banner_lines: list[tuple[str, str]], on_step: OnStep | None
    ) -> None:
        self.cfg = cfg
        self.banner_lines = banner_lines
        self.on_step = on_step
        self.session = Session(cfg, folder, "sft", LOG_EVERY)
        self.monitor = self.session.monitor
        self.last_metrics: dict[str, float] = {}
        self._epoch_orders: dict[int, IntArray] = {}

    def run(self) -> SftResult:
        session, folder = self.session, self.session.folder
        start = session.restore_newest_checkpoint()
        try:
            self.inputs = load_inputs(self.cfg, folder.root / START_FOLDER)
        except EmbodyError:  # the data or the model cannot be used
            folder.discard()
            raise
        env_file = resolve_asset(str(self.cfg.data.path)) / ENVIRONMENT_PATH
        if env_file.is_file():
            shutil.copyfile(env_file, folder.root / ENVIRONMENT_FILE)
        lines = [*self.banner_lines, *self.inputs.banner_lines, ("run", str(folder.root)), folder.log_command]
        session.print_banner(lines, self._count_total_steps())
        start_all = partial(
            _start_actors,
            self.cfg,
            self.inputs,
            total_steps=session.total,
            log_dir=folder.logs,
            write_line=self.monitor.text,
            progress=self.monitor.progress,
        )
        with session.running(start_all) as actors:
            return self._train(actors, start)

    def _count_total_steps(self) -> int:
        runner, batch = self.cfg.runner, self.cfg.actor.global_batch_size
        if runner.max_epochs < 0:
            return runner.max_steps
        return min(runner.max_steps, math.ceil(runner.max_epochs * len(self.inputs.train) / batch))

    def _train(self, actors: SftActors, start: Path | None) -> SftResult:
        with self.session.save_on_interrupt(partial(self._save, actors)):
            if start is not None:
                actors.loop.call(LoadRequest(folder=str(start)))
            self._loop(actors)
            checkpoint = self._save(actors)
            self.session.wait_for_save()
        root = self.session.folder.root
        env_file = root / ENVIRONMENT_FILE
        env_settings = read_saved(env_file) if env_file.is_file() else {}
        weights, trust = format_override("ckpt", str(root)), trust_overrides(self.cfg, env_settings)
        # Text rows and third-party data contain no environment settings.
        env_override = [] if env_file.is_file() else ["env=..."]
        commands = [["eval", weights, *env_override, *trust], ["train", weights, *env_override, *trust]]
        if self.cfg.objective.trains_reward_model:
            commands = [["train", "env=...", format_override("reward.path", str(checkpoint / POLICY_FOLDER))]]
        self.session.print_summary(checkpoint, *commands, ["report", str(root)])
        return SftResult(run=root, step=self.session.step, checkpoint=checkpoint, metrics=self.last_metrics)

    def _loop(self, actors: SftActors) -> None:
        session, runner = self.session, self.cfg.runner
        if session.step == 0 and runner.val_check_interval != -1:
            self.monitor.log(0, self._validate(actors))
        elif row := session.interrupted_validation_metrics(runner.val_check_interval):
            self.monitor.log(session.step, row | self._validate(actors))
        losses: list[float] = []
        started = time.perf_counter()
        while session.step < session.total:
            actors.supervisor.pump(0.0)  # signals take effect between two steps
            with actors.supervisor.defer_signals():
                row = self._update(actors)
                session.step += 1
            session.run_callback(self.on_step, row)
            losses += [row["actor/loss"]] if "actor/loss" in row else []
            is_last = session.step == session.total
            validates = session.is_due(runner.val_check_interval)
            self.monitor.progress(session.step, session.total, "steps")
            if validates or is_last or session.step % LOG_EVERY == 0:
                seconds = (time.perf_counter() - started) / max(1, len(losses))
                if losses:
                    row["actor/loss"] = math.fsum(losses) / len(losses)
                row["time/step"] = seconds
                row["time/samples_per_s"] = self.cfg.actor.global_batch_size / seconds
                try:
                    if validates:
                        row |= self._validate(actors)
                finally:
                    # The step is done and will not be repeated, even if its validation was interrupted.
                    self.monitor.log(session.step, row)
                losses, started = [], time.perf_counter()
            session.save_if_due(lambda: self._save(actors))

    def _update(self, actors: SftActors) -> dict[str, float]:
        """Run one optimizer step on the batch of the current step."""
        step, cfg = self.session.step, self.cfg
        rows = self._select_batch(step)
        starts = range(0, len(rows), cfg.actor.micro_batch_size) if augments_images(cfg) else ()
        seeds = tuple(derive(cfg.seed, "augment", step, start) for start in starts)
        with actors.write_samples(self.inputs.train, rows) as record_refs:
            reply = actors.loop.call(ImitateRequest(step=step, record_refs=record_refs, augment=seeds))
        return {f"actor/{name}": value for name, value in reply.metrics.items()}

    def _select_batch(self, step: int) -> IntArray:
        """Return the sample indices of the batch of a step, from one seeded permutation per epoch."""
        count, size = len(self.inputs.train), self.cfg.actor.global_batch_size
        # Computed from the step and not stored: a resumed run continues at the same position in the data.
        epochs, offsets = np.divmod(np.arange(step * size, (step + 1) * size), count)
        return np.concatenate([self._get_order(int(epoch))[offsets[epochs == epoch]] for epoch in np.unique(epochs)])

    def _get_order(self, epoch: int) -> IntArray:
        if epoch not in self._epoch_orders:
            count = len(self.inputs.train)
            rng = np.random.default_rng(derive(self.cfg.seed, "sft-order", epoch))
            self._epoch_orders = {epoch: rng.permutation(count) if self.cfg.data.shuffle else np.arange(count)}
        return self._epoch_orders[epoch]

    def _validate(self, actors: SftActors) -> dict[str, float]:
        """Return metrics of held-out samples, and of training samples without augmentation: loss, accuracy or error."""
        started = time.perf_counter()
        metrics = self._evaluate(actors, self.inputs.train, "train")
        score = metrics["train/loss"]
        if self.inputs.validation is not None:
            metrics |= self._evaluate(actors, self.inputs.validation, "eval")
            score = metrics["eval/loss"]
        self.session.record_score(-score)
        self.last_metrics = dict(metrics)
        return metrics | {"time/validate": time.perf_counter() - started}

    def _evaluate(self, actors: SftActors, samples: Samples, name: str) -> dict[str, float]:
        count, size = len(samples), self.cfg.actor.global_batch_size
        # Always the same samples, spread over all samples, so that the losses of two steps can be compared.
        rows = np.linspace(0, count - 1, min(count, VALIDATION_SAMPLES)).round().astype(np.int64)
        sums: dict[str, float] = {}
        for start in range(0, len(rows), size):
            with actors.write_samples(samples, rows[start : start + size]) as record_refs:
                reply = actors.loop.call(ImitateRequest(step=self.session.step, record_refs=record_refs, train=False))
            sums = {key: sums.get(key, 0.0) + value for key, value in reply.metrics.items()}
        if "error" in sums:  # continuous actions have an error instead of an accuracy
            accuracy_name, total = "action_error", sums["error"]
        else:
            accuracy_name = "token_accuracy" if self.cfg.objective.name is Objective.imitation else "accuracy"
            total = sums["accuracy"]
        return {f"{name}/loss": sums["loss"] / len(rows), f"{name}/{accuracy_name}": total / len(rows)}

    def _save(self, actors: SftActors) -> Path:
        meta = {"model": self.inputs.policy.name, "data": self.cfg.data.path}
        with actors.supervisor.defer_signals():
            return self.session.save(actors.save, meta)


def _start_actors(
    cfg: Config,
    inputs: SftInputs,
    *,
    total_steps: int,
    log_dir: Path,
    write_line: Callable[[str], None],
    progress: Progress,
) -> SftActors:
    """Start the actor ranks of an SFT run, and wait until they are ready.

    Args:
        cfg: config of the run.
        inputs: training data, and model with the statistics of the data.
        total_steps: training steps of the run.
        log_dir: folder for the ranks' logs.
        write_line: function that prints a line for the user.
        progress: function that is called while the ranks start.

    Raises:
        WorkerError: a rank could not start.
    """
    ranks, faults = count_ranks(cfg), cfg.faults
    # The samples of one optimizer step.
    capacity = inputs.train.steps_per_sample * cfg.actor.global_batch_size
    arena = Arena.create(inputs.layout, capacity, "Lower actor.global_batch_size.")
    launcher = LAUNCHERS.get(cfg.launcher.name)(log_dir, cfg.cluster)
    supervisor = Supervisor(launcher, faults, write_line)
    rendezvous = open_rendezvous(ranks, launcher.host, timeout_s=24 * faults.update_timeout_s)
    request = PolicyRequest(
        env=inputs.env,
        device="auto",
        seed=cfg.seed,
        gradient_checkpointing=cfg.actor.gradient_checkpointing,
        fresh_heads=True,
        value_dim=int(cfg.objective.trains_reward_model),
        action_log_std=action_log_std(inputs.train, inputs.env),
    )
    init = PolicyHostInit(
        model=inputs.model,
        objective=cfg.objective,
        actor=cfg.actor,
        seed=cfg.seed,
        deterministic=cfg.runner.deterministic,
        skips_nonfinite=faults.on_nonfinite is OnNonfinite.skip,
        request=request,
        arena=arena.handle,
        total_steps=total_steps,
        threads=get_num_threads(max(1, available_cores() // ranks)),
        acts=False,
        trains=True,
        shared_arena=get_shared_arena(cfg, arena),
    )
    specs = build_actor_specs(init, ranks, rendezvous.rank_info, plan_devices(cfg, training=True))
    policy = PolicyClient(supervisor, specs, timeout_s=faults.update_timeout_s)
    loop = EventLoop(supervisor, policy)
    actors = SftActors(supervisor=supervisor, arena=arena, policy=policy, loop=loop, rendezvous=rendezvous)
    actors.wait_until_ready(loop, specs, {}, progress)
    return actors
