"""The loss of supervised training: observations and what to imitate at each lie in records, as in RL."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import Record, decode_instruction
from embodyrl.policies.protocol import LearnsStatistics, TextPolicy, weights_changed
from embodyrl.types import FloatArray, ImitationScores, IntArray
from embodyrl.workers.augment import augment, draw
from embodyrl.workers.messages import ImitateRequest
from embodyrl.workers.rollout_worker import read_observation
from embodyrl.workers.training import InParts, Trainer, deal


class ImitationWorker:
    """One rank that lets its policy imitate records of the arena."""

    def __init__(self, trainer: Trainer, arena: Arena) -> None:
        self._trainer = trainer
        self._policy = trainer.policy
        self._arena = arena

    def update(self, request: ImitateRequest) -> InParts[dict[str, float]]:
        """Take one optimizer step on the mean loss of the records, or measure its sum.

        Returns loss, grad_norm, lr and skipped_nonfinite; or, where nothing is learnt, the sums `loss` and `accuracy`.
        """
        records = self._arena.read(request.tickets)
        self._trainer.ranks.train()
        self._policy.module.train(request.learn)
        if not request.learn:
            return self._measure(records)
        draws = self._draws(request.augment, len(records))
        result = yield from self._trainer.descend(
            np.ones(len(records), np.int64),
            request.step,
            lambda rows: self._imitate(records[rows], None if draws is None else draws[:, rows]),
            lambda scores, rows: (scores.loss.sum() / len(records), {}),
        )
        optimization = self._trainer.optimization
        optimization.zero_grad()
        if isinstance(self._policy, LearnsStatistics):
            self._policy.take_statistics(read_observation(self._arena, records))
            weights_changed(self._policy.module)
        return (result or {}) | {"lr": optimization.lr, "skipped_nonfinite": float(result is None)}

    @torch.no_grad()
    def _measure(self, records: IntArray) -> dict[str, float]:
        ranks, size = self._trainer.ranks, self._trainer.cfg.micro_batch_size
        parts = []
        for rows, counts in deal(np.ones(len(records), np.int64), ranks.rank_info, size, None):
            scores = ranks.score(lambda rows=rows: self._imitate(records[rows], None), last=True)
            if counts:
                parts.append({"loss": float(scores.loss.sum()), "accuracy": float(scores.accuracy.sum())})
        parts = ranks.exchange(parts)
        return {name: sum(part[name] for part in parts) for name in ("loss", "accuracy")}

    def _imitate(self, records: IntArray, draws: Tensor | None) -> ImitationScores:
        obs = read_observation(self._arena, records)
        if draws is not None:
            device = next(self._policy.module.parameters()).device
            obs = replace(obs, images=augment(obs.images, draws, device))
        return self._policy.imitate(obs, self._targets(records))

    def _targets(self, records: IntArray) -> FloatArray:
        """Actions [B, K, A]; of text the tokens of the reply."""
        if not isinstance(self._policy, TextPolicy):
            return self._arena[Record.action][records]
        replies = [decode_instruction(row) for row in self._arena[Record.reply][records]]
        return self._policy.encode_replies(replies)[:, :, None].astype(np.float32)

    def _draws(self, seeds: tuple[int, ...], count: int) -> Tensor | None:
        """Random numbers [D, count, C] of each sample's images, the same whichever rank it goes to."""
        cameras, size = self._arena[Record.images].shape[1], self._trainer.cfg.micro_batch_size
        if not seeds or not cameras:
            return None
        sizes = [min(size, count - start) for start in range(0, count, size)]
        return torch.cat(
            [draw(n * cameras, seed).unflatten(1, (n, cameras)) for n, seed in zip(sizes, seeds, strict=True)], 1
        )
