"""Supervised training on demonstrations, as RL's warm start or for its own sake."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodyrl import __version__
from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.checkpoint.tensors import load_state, rng_state, save_state, set_rng_state
from embodyrl.config.schema import Config
from embodyrl.datasets import read_card
from embodyrl.errors import CheckpointError, ConfigError, Interrupted, NonFiniteError
from embodyrl.files import write_atomically
from embodyrl.monitor import RunInfo, build_monitor
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.runtime.augment import augment
from embodyrl.runtime.build import mismatches
from embodyrl.runtime.rundir import RunFolder, open_run
from embodyrl.runtime.seeds import derive
from embodyrl.runtime.sft_setup import Samples, data_statistics, load_samples, sft_facts, start_model, with_statistics
from embodyrl.runtime.signals import StopRequest, stop_requests
from embodyrl.runtime.train import LOOP_FILE
from embodyrl.types import EnvSpec, FloatArray, IntArray
from embodyrl.workers.actor_worker import build_optimizer, build_schedule
from embodyrl.workers.messages import POLICY_FOLDER
from embodyrl.workers.policy_host import TRAINING_STATE

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


def sft(cfg: Config, *, overrides: Sequence[str] = (), resume: Path | None = None) -> SftResult:
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

    def __init__(self, cfg: Config, folder: RunFolder, facts: list[tuple[str, str]]) -> None:
        self.cfg = cfg
        self.folder = folder
        self.facts = facts
        self.store = CheckpointStore(folder.checkpoints)
        self.store.clean_stale()
        self.step = 0
        self.best = math.inf
        self.best_step: int | None = None
        self.measured: dict[str, float] = {}
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._orders: dict[int, IntArray] = {}

    def run(self) -> SftResult:
        start = self._find_start()
        _seed(self.cfg)
        monitor = self.monitor = build_monitor(self.cfg.runner.logger.backends)
        self.policy = self._prepare(start)
        self.total = self._total_steps()
        self.optimizer = build_optimizer(self.policy.module, self.cfg.actor)
        self.scheduler = build_schedule(self.optimizer, self.cfg.actor, self.total)
        if start is not None:
            self._restore(start)
        self._open_monitor()
        try:
            with stop_requests() as request:
                try:
                    self._loop(request)
                except Interrupted as interruption:
                    interruption.args = (
                        f"stopped after step {self.step}; saved {self._save()}; "
                        f"go on with: embodyrl sft --resume {self.folder.root}",
                    )
                    raise
            checkpoint = self._save()
            for line in (
                f"run        {self.folder.root}",
                f"checkpoint {checkpoint}",
                f"next       embodyrl eval env=... ckpt={self.folder.root}, or train with the same ckpt",
            ):
                monitor.text(line)
        finally:
            monitor.close()
        return SftResult(run=self.folder.root, step=self.step, checkpoint=checkpoint, metrics=self.measured)

    # --- set-up -----------------------------------------------------------------------------------------------------

    def _prepare(self, start: Path | None) -> Policy:
        """Load the data, then build the policy with their statistics."""
        cfg = self.cfg
        env = read_card(Path(str(cfg.data.path))).env
        factory = POLICIES.get(cfg.model.model_type)
        key = cfg.model.unnorm_key or env.unnorm_key or env.name
        source, target = start_model(cfg), self.folder.root / START_FOLDER
        # The source may know nothing of these data, and theirs depend on the policy's gripper: for its description
        # any statistics will do.
        blank = data_statistics(*_blank(env), env, 0)
        model = with_statistics(cfg.model, source, target, key, blank)
        spec = factory.spec(model, env, 0)
        if problems := mismatches(cfg, env, spec):
            raise ConfigError(problems)
        self.train, self.validation = load_samples(cfg, env, spec)
        demos, steps = self.train.demos, self.train.steps
        entry = data_statistics(self.train.actions[:, 0], demos.state[steps], env, demos.num_episodes)
        model = with_statistics(cfg.model, source, target, key, entry)
        device = str(self.device)
        request = PolicyRequest(env=env, value_dim=0, temperature=1.0, device=device, seed=cfg.seed, fresh_heads=True)
        policy = factory.build(model, request)
        if start is not None:
            policy.load_weights(start / POLICY_FOLDER)
        return policy

    def _total_steps(self) -> int:
        runner, batch = self.cfg.runner, self.cfg.actor.global_batch_size
        if runner.max_epochs < 0:
            return runner.max_steps
        return min(runner.max_steps, math.ceil(runner.max_epochs * len(self.train.steps) / batch))

    def _open_monitor(self) -> None:
        cfg = self.cfg
        info = RunInfo(
            run_id=self.folder.run_id,
            project=cfg.runner.logger.project_name,
            total_steps=self.total,
            resume_step=self.step + 1 if self.step else 0,
            summary=dict(self.facts),
        )
        self.monitor.open(self.folder.root, info)
        head = f"embodyrl {__version__} · sft · {self.folder.run_id} · seed {cfg.seed}"
        head += f" · resumed at step {self.step}" if self.step else ""
        held_out = 0 if self.validation is None else len(self.validation.steps)
        lines = [
            *self.facts,
            ("samples", f"{len(self.train.steps)} for training, {held_out} held out · device {self.device}"),
            ("output", str(self.folder.root)),
        ]
        self.monitor.banner([head, *(f"  {name:<10} {text}" for name, text in lines)])

    # --- training ---------------------------------------------------------------------------------------------------

    def _loop(self, request: StopRequest) -> None:
        if self.step == 0 and self.cfg.runner.val_check_interval != -1:
            self.monitor.log(0, self._measure())
        losses: list[float] = []
        began = time.perf_counter()
        while self.step < self.total:
            request.check()
            row = self._update()
            self.step += 1
            losses.append(row["actor/loss"])
            last = self.step == self.total
            checks = self._due(self.cfg.runner.val_check_interval)
            self.monitor.progress(self.step, self.total, "steps")
            if checks or last or self.step % LOG_EVERY == 0:
                seconds = (time.perf_counter() - began) / len(losses)
                row["actor/loss"] = math.fsum(losses) / len(losses)
                row["time/step"] = seconds
                row["time/samples_per_s"] = self.cfg.actor.global_batch_size / seconds
                try:
                    if checks:
                        row |= self._measure()
                finally:
                    # The step is done and will not be repeated, even if its validation was interrupted.
                    self.monitor.log(self.step, row)
                losses, began = [], time.perf_counter()
            if self._due(self.cfg.runner.save_interval) and not last:
                self._save()

    def _due(self, interval: int) -> bool:
        return interval != -1 and (self.step % interval == 0 or self.step == self.total)

    def _update(self) -> dict[str, float]:
        """One optimizer step on the batch that belongs to this step, whatever happened before."""
        actor = self.cfg.actor
        self.policy.module.train()
        lr = float(self.optimizer.param_groups[0]["lr"])
        picked = self._batch(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for start in range(0, len(picked), actor.micro_batch_size):
            part = picked[start : start + actor.micro_batch_size]
            obs = self.train.demos.observe(self.train.steps[part])
            if self.cfg.data.image_aug:
                seed = derive(self.cfg.seed, "augment", self.step, start)
                obs = replace(obs, images=augment(obs.images, seed=seed, device=self.device))
            loss = self.policy.imitate(obs, self.train.actions[part]).loss.sum() / len(picked)
            if not torch.isfinite(loss):
                raise NonFiniteError(f"Loss {float(loss.detach())} at step {self.step}. Try actor.optim.lr lower.")
            loss.backward()
            total += float(loss.detach())
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = float(torch.nn.utils.clip_grad_norm_(params, actor.optim.clip_grad))
        if not math.isfinite(norm):
            raise NonFiniteError(f"Gradient norm {norm} at step {self.step}. Try actor.optim.lr lower.")
        self.optimizer.step()
        self.scheduler.step()
        return {"actor/loss": total, "actor/grad_norm": norm, "actor/lr": lr}

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
        if judged < self.best:
            self.best, self.best_step = judged, self.step
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

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _save(self) -> Path:
        """Write a checkpoint of the current step, once, and drop old ones."""
        existing = self.store.path(self.step)
        if existing.is_dir():
            return existing
        best = self.best if self.best_step is not None else None
        loop = {"step": self.step, "best": best, "best_step": self.best_step, "version": __version__}
        state = {
            "optimizer": self.optimizer.state_dict(),
            "schedule": {"last_epoch": self.scheduler.last_epoch},
            "rng": rng_state(),
        }

        def fill(folder: Path) -> None:
            (folder / POLICY_FOLDER).mkdir()
            self.policy.save(folder / POLICY_FOLDER)
            save_state(folder, TRAINING_STATE, state)
            write_atomically(folder / LOOP_FILE, json.dumps(loop, indent=2) + "\n")

        path = self.store.write(self.step, fill, {"model": self.policy.spec.name, "data": self.cfg.data.path})
        keeps = self.cfg.checkpoint.keep_best and self.best_step is not None
        self.store.prune(self.cfg.checkpoint.keep, [self.best_step] if keeps and self.best_step is not None else [])
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
            loop: dict[str, Any] = json.loads((latest / LOOP_FILE).read_text(encoding="utf-8"))
            self.step, self.best_step = int(loop["step"]), loop["best_step"]
            self.best = math.inf if self.best_step is None else float(loop["best"])
        except (OSError, KeyError, ValueError) as error:
            raise CheckpointError(f"{latest / LOOP_FILE} is not usable: {error}.") from error
        return latest

    def _restore(self, start: Path) -> None:
        state = load_state(start, TRAINING_STATE)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.last_epoch = int(state["schedule"]["last_epoch"])
        set_rng_state(state["rng"])


def _blank(env: EnvSpec) -> tuple[FloatArray, FloatArray]:
    return np.zeros((1, env.action_dim), np.float32), np.zeros((1, env.state_dim), np.float32)


def _seed(cfg: Config) -> None:
    if cfg.runner.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    random.seed(cfg.seed)
    np.random.seed(cfg.seed % 2**32)
    torch.manual_seed(cfg.seed)
