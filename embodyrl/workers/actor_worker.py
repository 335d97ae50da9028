"""The actor worker: advantages in, gradient steps out."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.protocol import LossInputs, LossWeights
from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import Record
from embodyrl.policies.protocol import LearnsStatistics, Policy, weights_changed
from embodyrl.policies.tensors import on_device
from embodyrl.types import IntArray, PolicyScores, PreparedBatch
from embodyrl.workers.messages import ScoreRequest, UpdateRequest
from embodyrl.workers.rollout_worker import even_parts, read_observation
from embodyrl.workers.settings import ActorSettings
from embodyrl.workers.training import InParts, Trainer, mean_metrics

_REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proximal:
    """The ratio's denominator and factors on the loss, aligned with a batch."""

    logprob: torch.Tensor
    """[B, L]"""
    correction: torch.Tensor | None
    metrics: dict[str, float]


class ActorWorker:
    """One rank that trains the policy it shares with the rollout worker."""

    def __init__(
        self,
        trainer: Trainer,
        arena: Arena,
        algorithm: Algorithm,
        cfg: ActorSettings,
        seed: int,
        reference: Policy | None,
    ) -> None:
        self._trainer = trainer
        self._policy = trainer.policy
        self._ranks = trainer.ranks
        self._arena = arena
        self._algorithm = algorithm
        self._cfg = cfg
        self._rules = algorithm.settings
        self._seed = seed
        self._reference = reference

    def score(self, request: ScoreRequest) -> None:
        """Write the reference policy's log-probabilities."""
        assert self._reference is not None, "no reference policy was built"
        size = self._cfg.micro_batch_size
        for part in self._ranks.rank_info.share(len(request.tickets), size):
            records = self._arena.read(request.tickets[part])
            with torch.no_grad():
                scores = self._reference.score(
                    read_observation(self._arena, records), self._arena[Record.tokens][records]
                )
            self._arena[Record.ref_logprob][records] = scores.logprob.float().cpu().numpy()

    def update(self, request: UpdateRequest) -> InParts[dict[str, float]]:
        """Train on the batch, pausing after each micro-batch.

        Returns metrics averaged over optimizer steps (maxima for names ending in _max).
        """
        records = self._arena.read(request.tickets)
        batch = self._batch(records, np.asarray(request.episode, dtype=np.int64))
        if self._algorithm.recomputes_logprob:
            self._ranks.act()
        proximal = yield from self._proximal(batch)
        self._ranks.train()
        result = yield from self._train(batch, proximal, request.step)
        # Gradients are as large as the weights, and nobody needs them until the next update.
        self._trainer.optimization.zero_grad()
        if isinstance(self._policy, LearnsStatistics):
            # Only now: during the update the ratio compares with what these statistics' predecessors have drawn.
            self._policy.take_statistics(read_observation(self._arena, records))
            weights_changed(self._policy.module)
        interval = self._rules.reference_interval
        if self._reference is not None and interval and (request.step + 1) % interval == 0:
            own = getattr(self._policy, "alone", self._policy).module.state_dict()
            with torch.no_grad():
                for name, weight in self._reference.module.state_dict().items():
                    weight.copy_(own[name])
            weights_changed(self._reference.module)
        self._ranks.reshard()
        return result

    def save(self, folder: Path) -> None:
        """Write a reference that follows the policy below a checkpoint's folder."""
        if self._reference is not None and self._rules.reference_interval:
            (folder / _REFERENCE).mkdir()
            self._reference.save(folder / _REFERENCE)

    def load(self, folder: Path) -> None:
        """Load what `save` wrote, where it did."""
        if self._reference is not None and self._rules.reference_interval and (folder / _REFERENCE).is_dir():
            self._reference.load_weights(folder / _REFERENCE)

    def _train(self, batch: PreparedBatch, proximal: _Proximal, step: int) -> InParts[dict[str, float]]:
        warming_up = step < self._algorithm.critic_warmup
        limit, kl_limit = self._rules.early_stop_imp_ratio or math.inf, self._rules.early_stop_kl or math.inf
        steps: list[dict[str, float]] = []
        skipped, stopped = 0, 0.0
        planned = list(self._samples(len(batch.records), step))
        for number, samples in enumerate(planned):
            position = step + number / len(planned)
            metrics = yield from self._optimizer_step(batch, samples, proximal, position, values_only=warming_up)
            skipped += metrics is None
            if metrics:
                steps.append(metrics)
                # After the step that went too far, not before it: what it did shows only now.
                if metrics.get("ratio", 0.0) > limit or metrics.get("kl", 0.0) > kl_limit:
                    stopped = 1.0
                    break
        result = mean_metrics(steps) | proximal.metrics
        if math.isfinite(min(limit, kl_limit)):
            result["early_stopped"] = stopped
        result["lr"] = self._trainer.optimization.lr
        result["optimizer_steps"] = float(len(steps))
        result["skipped_nonfinite"] = float(skipped)
        if steps and "logprob_gap" in steps[0]:
            # Before the first step of an update the weights are those that acted: any gap is numerical.
            result["logprob_gap"] = steps[0]["logprob_gap"]
        return result

    def _samples(self, count: int, step: int) -> Iterator[IntArray]:
        """Yield the samples of each optimizer step of an update."""
        for epoch in range(self._rules.update_epoch):
            # The same order on all ranks and after a resume: it depends on nothing but seed, step and epoch.
            order = _shuffle(count, self._seed, step, epoch)
            start = 0
            for size in even_parts(count, self._cfg.global_batch_size, self._cfg.minibatches):
                yield order[start : start + size]
                start += size

    def _proximal(self, batch: PreparedBatch) -> InParts[_Proximal]:
        """Score the batch with the present weights if the algorithm asks for it; else take the rollout's numbers."""
        behaviour = torch.from_numpy(self._arena[Record.logprob][batch.records])
        if not self._algorithm.recomputes_logprob:
            return _Proximal(logprob=behaviour, correction=None, metrics={})
        parts = []
        for start in range(0, len(batch.records), self._cfg.micro_batch_size):
            records = batch.records[start : start + self._cfg.micro_batch_size]
            with torch.no_grad():
                scores = self._score(records)
            parts.append(scores.logprob.float().cpu())
            yield
        logprob = torch.cat(parts)
        correction, metrics = self._algorithm.correct(logprob, behaviour, torch.from_numpy(batch.valid))
        return _Proximal(logprob=logprob, correction=correction, metrics=metrics)

    def _batch(self, records: IntArray, episode: IntArray) -> PreparedBatch:
        arena = self._arena
        return PreparedBatch(
            records=records,
            episode=episode,
            advantage=arena[Record.advantage][records],
            returns=arena[Record.returns][records],
            valid=arena[Record.valid][records],
            has_signal=True,
        )

    def _optimizer_step(
        self, batch: PreparedBatch, samples: IntArray, proximal: _Proximal, position: float, *, values_only: bool
    ) -> InParts[dict[str, float] | None]:
        """Accumulate gradients over micro-batches and step.

        Returns None if a non-finite gradient was skipped, and nothing at all if no sample can contribute a gradient.
        Samples that cannot are left out of the forward pass, but not out of the weights of the others.
        """
        # Of all samples of the optimizer step, before the inert ones are left out: they count in the denominators.
        weights = self._algorithm.weights(batch, samples)
        inert = self._algorithm.inert(batch)[samples]
        if inert.all():
            return {}
        useful = ~inert if inert.any() else slice(None)
        weights, chosen = weights.rows(useful), samples[useful]
        records = batch.records[chosen]

        def loss(scores: PolicyScores, rows: IntArray) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            device = scores.logprob.device
            return self._algorithm.loss(scores, self._inputs(batch, chosen[rows], weights.rows(rows), proximal, device))

        return (
            yield from self._trainer.descend(
                self._arena[Record.cost][records],
                position,
                lambda rows: self._score(records[rows]),
                loss,
                max_cost=self._cfg.max_tokens_per_mbs,
                values_only=values_only,
            )
        )

    def _score(self, records: IntArray) -> PolicyScores:
        return self._policy.score(read_observation(self._arena, records), self._arena[Record.tokens][records])

    def _inputs(
        self, batch: PreparedBatch, samples: IntArray, weights: LossWeights, proximal: _Proximal, device: torch.device
    ) -> LossInputs:
        arena, records = self._arena, batch.records[samples]
        masks = self._rules.off_policy_masking_delta is not None

        def tensor(array: np.ndarray | torch.Tensor) -> torch.Tensor:
            return on_device(array, device)

        return LossInputs(
            old_logprob=tensor(proximal.logprob[samples]),
            ref_logprob=tensor(arena[Record.ref_logprob][records]) if self._reference is not None else None,
            advantage=tensor(batch.advantage[samples]),
            returns=tensor(batch.returns[samples]),
            old_value=tensor(arena[Record.value][records]),
            valid=tensor(valid := batch.valid[samples]),
            whole=bool(valid.all()),
            weight=tensor(weights.policy),
            value_weight=tensor(weights.value),
            positive_weight=tensor(weights.positive),
            behaviour_logprob=tensor(arena[Record.logprob][records]) if masks else None,
            correction=None if proximal.correction is None else tensor(proximal.correction[samples]),
        )


def _shuffle(count: int, seed: int, step: int, epoch: int) -> IntArray:
    return np.random.default_rng(np.random.SeedSequence([seed, step, epoch, 0x5A])).permutation(count)
