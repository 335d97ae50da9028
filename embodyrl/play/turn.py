"""Action selection of a policy in an episode that advances one env step at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from embodyrl.api.acting import LoadedPolicy
from embodyrl.envs.delay import committed_columns, delay_of
from embodyrl.types import FloatArray


class Turn:
    """Selector of the next action from the policy's chunks, with the delay and overlap of the run (see `delay.env`)."""

    def __init__(self, policy: LoadedPolicy) -> None:
        self._policy = policy
        cfg, context = policy.run_plan.cfg.env, policy.run_plan.context
        self._timing = delay_of(cfg, context) if context.overlap or cfg.delay[1] else None
        overlap = 0 if self._timing is None else self._timing.overlap
        self._period = policy.policy.spec.num_action_chunks - overlap
        self._chunk: FloatArray | None = None
        """[K, A] current chunk, in which `_next` is the index of the next action; None: no chunk yet."""
        self._next = 0
        self._following: tuple[int, FloatArray] | None = None
        """Delay and actions [K, A] of the next chunk; None before the inference of the next chunk."""
        self._count = 0
        """Number of chunks since the policy began to act."""

    def end(self) -> None:
        """Discard all planned actions; the next chunk has no delay, as at the start of an episode."""
        self._chunk, self._following, self._next, self._count = None, None, 0, 0

    def action(self, seen: dict[str, Any], start: Mapping[str, int], instruction: str | None) -> FloatArray:
        """Return the next action [A].

        Args:
            seen: the current observation.
            start: reset_id and seed of the episode, which determine its delays.
            instruction: the language instruction.
        """
        if self._chunk is None:
            self._chunk = self._infer(seen, 0, None, instruction)
        chunk = self._chunk
        while self._next >= self._period:
            if self._following is None:
                self._count += 1
                delay = reported = 0
                if self._timing is not None:
                    delay, reported = self._timing.delays(start["seed"], start["reset_id"], self._count)
                    delay = max(delay, reported) if self._timing.observed else delay
                self._following = delay, self._infer(seen, reported, chunk[self._period :], instruction)
            begin, following = self._following
            if self._next < self._period + begin:
                break
            self._chunk, self._next, self._following = (chunk := following), begin, None
        self._next += 1
        return chunk[self._next - 1]

    def _infer(
        self, seen: dict[str, Any], reported: int, left: FloatArray | None, instruction: str | None
    ) -> FloatArray:
        env = self._policy.run_plan.env
        if env.committed is not None:
            columns = committed_columns(reported, left, env.committed.width(env.action.dim))
            seen = seen | {"state": np.concatenate([seen.get("state", np.zeros(0, np.float32)), columns])}
        return self._policy.act(seen, instruction=instruction)
