"""Learner of policy-gradient algorithms."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from embodyrl.algorithms.metrics import compute_metrics, merge_metrics
from embodyrl.algorithms.protocol import LossInputs, LossWeights, MetricInputs
from embodyrl.channels.arena import read_observation
from embodyrl.channels.layout import Record
from embodyrl.channels.messages import ScoreRequest, UpdateRequest
from embodyrl.learners.protocol import Learner, LearnerContext
from embodyrl.learners.training import UpdateGenerator, average_metrics, order_by_prompt
from embodyrl.policies.protocol import TextPolicy, mark_weights_changed
from embodyrl.policies.tensors import get_peak_memory, to_device
from embodyrl.types import IntArray, PolicyScores, PreparedBatch

_REFERENCE = "reference"
MAX_COLLECTED_TOKENS = 2**18
"""Number of sampled tokens of all ranks after which the collected metrics are computed, to limit the memory."""
_StepResult = tuple[dict[str, float], list[MetricInputs]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proximal:
    """Old log-probabilities (denominators of the policy ratio) and correction factors of the samples of a batch."""

    logprob: torch.Tensor
    """[B, L] log-probabilities of the old policy."""
    correction: torch.Tensor | None
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatch:
    """A micro-batch of B samples."""

    records: IntArray
    """[B] record indices, from which observations and tokens are read before the forward pass."""
    inputs: LossInputs
    """Inputs of the loss function, in host memory."""


class PolicyGradientLearner(Learner):
    """Learner of policy-gradient algorithms in one training rank."""

    def __init__(self, context: LearnerContext) -> None:
        self._trainer = trainer = context.trainer
        self._policy = trainer.policy
        self._ranks = trainer.ranks
        self._arena = context.arena
        assert context.algorithm is not None
        self._algorithm = context.algorithm
        self._cfg = trainer.cfg
        self._settings = context.algorithm.settings
        self._seed = context.seed
        self._reference = context.reference

    def score(self, request: ScoreRequest) -> None:
        """Write the reference policy's log-probabilities into the records."""
        assert self._reference is not None, "there is no reference policy"
        size = self._cfg.micro_batch_size
        for part in self._ranks.rank_info.get_slices(len(request.record_refs), size):
            records = self._arena.read(request.record_refs[part])
            with torch.no_grad():
                scores = self._reference.score(
                    read_observation(self._arena, records), self._arena[Record.tokens][records]
                )
            self._arena[Record.ref_logprob][records] = scores.logprob.float().cpu().numpy()

    def update(self, request: UpdateRequest) -> UpdateGenerator[dict[str, float]]:
        """Train on the batch, yielding after each micro-batch.

        Returns metrics averaged over optimizer steps (maxima for names that end in _max).
        """
        records = self._arena.read(request.record_refs)
        batch = self._build_batch(records, np.asarray(request.episode, dtype=np.int64))
        if self._algorithm.recomputes_logprob:
            # Recompute log-probabilities with gathered weights, as in the rollout, so that only the weights differ.
            self._ranks.gather_weights()
        proximal = yield from self._compute_proximal(batch)
        self._ranks.shard_weights()
        result = yield from self._run_update(batch, proximal, request.step)
        # Gradients are as large as the weights, and are not needed until the next update.
        self._trainer.optimization.zero_grad()
        # Statistics change after the update, because its ratios are relative to the statistics used in the rollout.
        self._trainer.update_statistics(self._arena, records)
        interval = self._settings.reference_interval
        if self._reference is not None and interval and (request.step + 1) % interval == 0:
            weights = getattr(self._policy, "policy_without_critic", self._policy).module.state_dict()
            with torch.no_grad():
                for name, weight in self._reference.module.state_dict().items():
                    weight.copy_(weights[name])
            mark_weights_changed(self._reference.module)
        self._ranks.reshard()
        return result | {"memory_gib": get_peak_memory() / 2**30}

    def save(self, folder: Path) -> None:
        """Save the reference policy into `folder` if it is updated during training."""
        if self._reference is not None and self._settings.reference_interval:
            (folder / _REFERENCE).mkdir()
            self._reference.save(folder / _REFERENCE)

    def load(self, folder: Path) -> None:
        """Load the files written by `save`, if any."""
        if self._reference is not None and self._settings.reference_interval and (folder / _REFERENCE).is_dir():
            self._reference.load_weights(folder / _REFERENCE)

    def _run_update(self, batch: PreparedBatch, proximal: _Proximal, step: int) -> UpdateGenerator[dict[str, float]]:
        warming_up = step < self._algorithm.critic_warmup
        limit, kl_limit = self._settings.early_stop_imp_ratio or math.inf, self._settings.early_stop_kl or math.inf
        can_stop_early = math.isfinite(min(limit, kl_limit))
        steps: list[dict[str, float]] = []
        pending: list[_StepResult] = []
        num_tokens, skipped, stopped = 0, 0, 0.0
        sizes = split_evenly(len(batch.records), self._cfg.global_batch_size, self._cfg.minibatches)
        samples_by_step: list[IntArray] = []
        for number in range(total := self._settings.update_epoch * len(sizes)):
            if number % len(sizes) == 0:
                # The order depends only on seed, step and epoch, so it is equal on all ranks and after a resume.
                order = _shuffle(len(batch.records), self._seed, step, number // len(sizes))
                samples_by_step = np.split(order, np.cumsum(sizes[:-1]))
            parts = self._build_micro_batches(batch, proximal, samples_by_step[number % len(sizes)])
            if not parts:
                continue
            step_result = yield from self._trainer.run_optimizer_step(
                parts, step + number / total, self._score, self._loss, values_only=warming_up
            )
            skipped += step_result is None
            if step_result is None:
                continue
            pending.append(step_result)
            # Count the tokens of all ranks, because all ranks must exchange metrics after the same steps.
            num_tokens += sizes[number % len(sizes)] * self._arena[Record.tokens].shape[1]
            if can_stop_early or num_tokens >= MAX_COLLECTED_TOKENS:
                steps += self._compute_metrics(pending)
                pending, num_tokens = [], 0
                # Stop after the step that exceeded the limit, because its metrics are available only now.
                if steps[-1]["ratio"] > limit or steps[-1]["kl"] > kl_limit:
                    stopped = 1.0
                    break
        steps += self._compute_metrics(pending)
        result = average_metrics(steps) | proximal.metrics
        if can_stop_early:
            result["early_stopped"] = stopped
        result["lr"] = self._trainer.optimization.lr
        result["optimizer_steps"] = float(len(steps))
        result["skipped_nonfinite"] = float(skipped)
        if steps:
            # Before the first step of an update, weights equal those of the rollout, so any gap is numerical.
            result["logprob_gap"] = steps[0]["logprob_gap"]
        return result

    def _compute_metrics(self, step_results: list[_StepResult]) -> list[dict[str, float]]:
        """Return the metrics of each optimizer step, merged over micro-batches and ranks."""
        parts = iter(compute_metrics([inputs for _, metric_inputs in step_results for inputs in metric_inputs]))
        return [
            merge_metrics(self._ranks.gather_metrics([next(parts) for _ in metric_inputs])) | step_metrics
            for step_metrics, metric_inputs in step_results
        ]

    def _compute_proximal(self, batch: PreparedBatch) -> UpdateGenerator[_Proximal]:
        """Return the old log-probabilities: recomputed if the algorithm requires this, otherwise from the rollout."""
        behavior = torch.from_numpy(self._arena[Record.logprob].take(batch.records, 0))
        if not self._algorithm.recomputes_logprob:
            return _Proximal(logprob=behavior, correction=None, metrics={})
        logprob = torch.zeros_like(behavior)
        for rows in self._ranks.rank_info.get_slices(len(batch.records), self._cfg.micro_batch_size):
            records = batch.records[rows]
            with torch.no_grad():
                observation = read_observation(self._arena, records, resized=True)
                scores = self._policy.score(observation, self._arena[Record.tokens][records])
            logprob[rows] = scores.logprob.float().cpu()
            yield
        logprob = self._ranks.sum_over_ranks(logprob)  # only one rank has each sample's value
        correction, metrics = self._algorithm.correct(logprob, behavior, torch.from_numpy(batch.valid))
        return _Proximal(logprob=logprob, correction=correction, metrics=metrics)

    def _build_batch(self, records: IntArray, episode: IntArray) -> PreparedBatch:
        arena = self._arena
        return PreparedBatch(
            records=records,
            episode=episode,
            advantage=arena[Record.advantage].take(records, 0),
            returns=arena[Record.returns].take(records, 0),
            valid=arena[Record.valid].take(records, 0),
            has_signal=True,
        )

    def _build_micro_batches(
        self, batch: PreparedBatch, proximal: _Proximal, samples: IntArray
    ) -> list[tuple[_MicroBatch, bool]]:
        """Return the micro-batches of an optimizer step with these samples; an empty list if there is no gradient.

        Samples without a gradient are skipped in the forward pass, but count in the weights of all samples.
        """
        useful = np.flatnonzero(~self._algorithm.zero_gradient_mask(batch)[samples])
        if not len(useful):
            return []
        cost = None
        if isinstance(self._policy, TextPolicy):
            records = batch.records[samples[useful]]
            cost = self._arena[Record.cost][records]
            if len(useful) > self._cfg.micro_batch_size:
                # A micro-batch computes equal prompts once, and is padded to its longest sample.
                order = order_by_prompt(self._arena[Record.instruction][records], cost)
                useful, cost = useful[order], cost[order]
        # Weights include samples without a gradient, because these count in the denominators.
        weights = self._algorithm.weights(batch, samples)
        parts: list[tuple[_MicroBatch, bool]] = []
        for part, counted in self._trainer.split_micro_batches(len(useful), cost):
            rows = useful.take(part)
            inputs = self._build_inputs(batch, samples.take(rows), weights.rows(rows), proximal)
            parts.append((_MicroBatch(records=batch.records.take(samples.take(rows)), inputs=inputs), counted))
        return parts

    def _score(self, part: _MicroBatch) -> PolicyScores:
        observation = read_observation(self._arena, part.records, resized=True)
        return self._policy.score(observation, self._arena[Record.tokens].take(part.records, 0))

    def _loss(self, scores: PolicyScores, part: _MicroBatch) -> tuple[torch.Tensor, MetricInputs]:
        inputs, device = part.inputs, scores.logprob.device
        if device.type != "cpu":
            inputs = replace(inputs, **{name: to_device(value, device) for name, value in inputs.tensors().items()})
        return self._algorithm.loss(scores, inputs)

    def _build_inputs(
        self, batch: PreparedBatch, samples: IntArray, weights: LossWeights, proximal: _Proximal
    ) -> LossInputs:
        arena, records = self._arena, batch.records.take(samples)
        needs_behavior = self._settings.off_policy_masking_delta is not None
        tensor, rows = torch.from_numpy, torch.from_numpy(samples)
        return LossInputs(
            old_logprob=proximal.logprob.index_select(0, rows),
            ref_logprob=tensor(arena[Record.ref_logprob].take(records, 0)) if self._reference is not None else None,
            advantage=tensor(batch.advantage.take(samples, 0)),
            returns=tensor(batch.returns.take(samples, 0)),
            old_value=tensor(arena[Record.value].take(records, 0)),
            valid=tensor(batch.valid.take(samples, 0)),
            weight=tensor(weights.policy),
            value_weight=tensor(weights.value),
            positive_weight=tensor(weights.positive),
            behavior_logprob=tensor(arena[Record.logprob].take(records, 0)) if needs_behavior else None,
            correction=None if proximal.correction is None else proximal.correction.index_select(0, rows),
        )


def _shuffle(count: int, seed: int, step: int, epoch: int) -> IntArray:
    return np.random.default_rng(np.random.SeedSequence([seed, step, epoch, 0x5A])).permutation(count)


def split_evenly(total: int, largest: int, number: int | None = None) -> list[int]:
    """Split `total` into `number` nearly equal parts, or by default into the fewest parts of at most `largest`.

    >>> split_evenly(10, 4), split_evenly(10, 4, 2)
    ([4, 3, 3], [5, 5])
    """
    if total == 0:
        return []
    count = math.ceil(total / largest) if number is None else min(number, total)
    return [total // count + (i < total % count) for i in range(count)]
