"""Supervised training on demonstrations, as RL's warm start or for its own sake."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from embodyrl.cluster.signals import StopRequest
from embodyrl.commands.run_folder import RunFolder, open_run
from embodyrl.commands.session import Session
from embodyrl.commands.sft_setup import (
    Samples,
    augments,
    build_text_policy,
    data_statistics,
    load_samples,
    load_text,
    sft_facts,
    start_model,
    with_statistics,
)
from embodyrl.datasets.layout import read_card
from embodyrl.datasets.settings import RowSettings
from embodyrl.errors import ConfigError, Interrupted, NonFiniteError
from embodyrl.plan.blueprint import mismatches
from embodyrl.plan.roots import SftConfig
from embodyrl.plan.seeds import derive
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.types import EnvSpec, FloatArray, IntArray
from embodyrl.workers.augment import augment
from embodyrl.workers.training import Optimization, best_device, seed_everything

LOG_EVERY = 10
"""Optimizer steps per row of metrics."""
VALIDATION_SAMPLES = 512
START_FOLDER = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class SftResult:
    """What a finished training leaves."""

    run: Path
    step: int
    checkpoint: Path
    metrics: dict[str, float]
    """Of the last validation; empty if there was none."""


def sft(cfg: SftConfig, *, overrides: Sequence[str] = (), resume: Path | None = None) -> SftResult:
    """Train from `cfg`, or continue the run in `resume`.

    Raises:
        EmbodyError: every failure that has a cause to name; its `exit_code` is the process's.
    """
    facts = sft_facts(cfg)
    folder = open_run(cfg, "sft", overrides, resume)
    try:
        return _Sft(cfg, folder, facts).run()
    finally:
        folder.unlock()


class _Sft:
    """One process's share of a run."""

    def __init__(self, cfg: SftConfig, folder: RunFolder, facts: list[tuple[str, str]]) -> None:
        self.cfg = cfg
        self.facts = facts
        self.session = Session(cfg, folder, "sft")
        self.monitor = self.session.monitor
        self.measured: dict[str, float] = {}
        self.device = torch.device(best_device())
        self._orders: dict[int, IntArray] = {}

    def run(self) -> SftResult:
        session, root = self.session, self.session.folder.root
        start = session.find_start()
        seed_everything(self.cfg.seed, deterministic=self.cfg.runner.deterministic)
        self.policy = self._prepare()
        total = self._total_steps()
        self.optimization = Optimization(self.policy.module, self.cfg.actor.optim, total)
        if start is not None:
            self.optimization.load(start, self.policy)
        held_out = 0 if self.validation is None else len(self.validation.steps)
        samples = f"{len(self.train.steps)} for training, {held_out} held out · device {self.device}"
        session.announce([*self.facts, ("samples", samples), ("output", str(root))], total)
        try:
            request = StopRequest()
            with request.listening():
                try:
                    self._loop(request)
                except Interrupted as interruption:
                    raise session.stop_message(interruption, self._save()) from None
            checkpoint = self._save()
            session.wait_for_save()
            for line in (
                f"run        {root}",
                f"checkpoint {checkpoint}",
                f"next       embodyrl eval env=... ckpt={root}, or train with the same ckpt",
            ):
                self.monitor.text(line)
        finally:
            self.monitor.close()
        return SftResult(run=root, step=session.step, checkpoint=checkpoint, metrics=self.measured)

    # --- set-up -----------------------------------------------------------------------------------------------------

    def _prepare(self) -> Policy:
        """Load the data, then build the policy with their statistics."""
        cfg = self.cfg
        if isinstance(cfg.data, RowSettings):
            speaker = build_text_policy(cfg, str(self.device))
            self.train, self.validation = load_text(cfg, speaker)
            return speaker
        env = read_card(Path(str(cfg.data.path))).env
        factory = POLICIES.get(cfg.model.model_type)
        key = getattr(cfg.model, "unnorm_key", None) or env.unnorm_key or env.name
        source, target = start_model(cfg), self.session.folder.root / START_FOLDER
        # The source may know nothing of these data, and theirs depend on the policy's gripper: for its description
        # any statistics will do.
        blank = data_statistics(*_blank(env), env, 0)
        model = with_statistics(cfg.model, source, target, key, blank)
        spec = factory.spec(model, env, 0)
        if problems := mismatches(env, spec):
            raise ConfigError(problems)
        self.train, self.validation = load_samples(cfg, env, spec)
        demos, steps = self.train.demos, self.train.steps
        episodes = len(np.unique(np.searchsorted(demos.stop, steps, side="right")))
        entry = data_statistics(self.train.actions[:, 0], demos.state[steps], env, episodes)
        model = with_statistics(cfg.model, source, target, key, entry)
        request = PolicyRequest(env=env, device=str(self.device), seed=cfg.seed, fresh_heads=True)
        return factory.build(model, request)

    def _total_steps(self) -> int:
        runner, batch = self.cfg.runner, self.cfg.actor.global_batch_size
        if runner.max_epochs < 0:
            return runner.max_steps
        return min(runner.max_steps, math.ceil(runner.max_epochs * len(self.train.steps) / batch))

    # --- training ---------------------------------------------------------------------------------------------------

    def _loop(self, request: StopRequest) -> None:
        session, runner = self.session, self.cfg.runner
        if session.step == 0 and runner.val_check_interval != -1:
            self.monitor.log(0, self._measure())
        losses: list[float] = []
        began = time.perf_counter()
        while session.step < session.total:
            request.check()
            row = self._update()
            session.step += 1
            losses.append(row["actor/loss"])
            last = session.step == session.total
            checks = session.due(runner.val_check_interval)
            self.monitor.progress(session.step, session.total, "steps")
            if checks or last or session.step % LOG_EVERY == 0:
                seconds = (time.perf_counter() - began) / len(losses)
                row["actor/loss"] = math.fsum(losses) / len(losses)
                row["time/step"] = seconds
                row["time/samples_per_s"] = self.cfg.actor.global_batch_size / seconds
                try:
                    if checks:
                        row |= self._measure()
                finally:
                    # The step is done and will not be repeated, even if its validation was interrupted.
                    self.monitor.log(session.step, row)
                losses, began = [], time.perf_counter()
            session.save_if_due(self._save)

    def _update(self) -> dict[str, float]:
        """One optimizer step on the batch that belongs to this step, whatever happened before."""
        size, step = self.cfg.actor.micro_batch_size, self.session.step
        self.policy.module.train()
        picked = self._batch(step)
        self.optimization.zero_grad()
        total = 0.0
        for start in range(0, len(picked), size):
            part = picked[start : start + size]
            obs = self.train.demos.observe(self.train.steps[part])
            if augments(self.cfg) and obs.images.size:
                seed = derive(self.cfg.seed, "augment", step, start)
                obs = replace(obs, images=augment(obs.images, seed=seed, device=self.device))
            loss = self.policy.imitate(obs, self.train.actions[part]).loss.sum() / len(picked)
            if not torch.isfinite(loss):
                raise NonFiniteError(f"Loss {float(loss.detach())} at step {step}. Try actor.optim.lr lower.")
            loss.backward()
            total += float(loss.detach())
        norm = self.optimization.step(step)
        if not math.isfinite(norm):
            raise NonFiniteError(f"Gradient norm {norm} at step {step}. Try actor.optim.lr lower.")
        return {"actor/loss": total, "actor/grad_norm": norm, "actor/lr": self.optimization.lr}

    def _batch(self, step: int) -> IntArray:
        """Rows of the batch of a step: a walk through one seeded permutation per epoch."""
        count, size = len(self.train.steps), self.cfg.actor.global_batch_size
        parts: list[IntArray] = []
        position, missing = step * size, size
        while missing:
            epoch, offset = divmod(position, count)
            part = self._order(epoch)[offset : offset + missing]
            parts.append(part)
            position, missing = position + len(part), missing - len(part)
        return np.concatenate(parts)

    def _order(self, epoch: int) -> IntArray:
        if epoch not in self._orders:
            count = len(self.train.steps)
            rng = np.random.default_rng(derive(self.cfg.seed, "sft-order", epoch))
            self._orders = {epoch: rng.permutation(count) if self.cfg.data.shuffle else np.arange(count)}
        return self._orders[epoch]

    # --- validation -------------------------------------------------------------------------------------------------

    def _measure(self) -> dict[str, float]:
        """Loss and token accuracy on held-out episodes, and on as many training samples without augmentation."""
        started = time.perf_counter()
        metrics = self._score(self.train, "train")
        judged = metrics["train/loss"]
        if self.validation is not None:
            metrics |= self._score(self.validation, "eval")
            judged = metrics["eval/loss"]
        self.session.record_score(-judged)
        self.measured = dict(metrics)
        return metrics | {"time/validate": time.perf_counter() - started}

    @torch.no_grad()
    def _score(self, samples: Samples, name: str) -> dict[str, float]:
        self.policy.module.eval()
        count = len(samples.steps)
        rows = np.linspace(0, count - 1, min(count, VALIDATION_SAMPLES)).round().astype(np.int64)
        loss = accuracy = 0.0
        for start in range(0, len(rows), self.cfg.actor.micro_batch_size):
            part = rows[start : start + self.cfg.actor.micro_batch_size]
            obs = samples.demos.observe(samples.steps[part])
            scores = self.policy.imitate(obs, samples.actions[part])
            loss += float(scores.loss.sum())
            accuracy += float(scores.accuracy.sum())
        return {f"{name}/loss": loss / len(rows), f"{name}/token_accuracy": accuracy / len(rows)}

    def _save(self) -> Path:
        meta = {"model": self.policy.spec.name, "data": self.cfg.data.path}
        return self.session.save(lambda folder: self.optimization.save(folder, self.policy), meta)


def _blank(env: EnvSpec) -> tuple[FloatArray, FloatArray]:
    return np.zeros((1, env.action_dim), np.float32), np.zeros((1, env.state_dim), np.float32)
