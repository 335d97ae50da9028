"""Slots of one natively batched simulator, which steps all of them at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from embodyrl.envs.chunked import Choice, ChunkedEnv, SimStep, SlotSimulators
from embodyrl.envs.protocol import AfterStep
from embodyrl.types import ChunkResult, FloatArray


class BatchedSimulators(SlotSimulators, Protocol):
    """`SlotSimulators` that step together; their `step` is never called."""

    def advance(self, actions: Mapping[int, FloatArray]) -> Mapping[int, SimStep]:
        """Execute one action [A] in each of these slots; what all others do meanwhile is nobody's concern."""
        ...


class LockstepEnv(ChunkedEnv):
    """`ChunkedEnv` for an `EnvSpec` with `lockstep`: the slots whose episodes run are stepped in one call, always."""

    _sims: BatchedSimulators

    def _fill(self, result: ChunkResult, slots: Sequence[int], choose: Choice, after_step: AfterStep | None) -> None:
        for k in range(result.valid.shape[1]):
            running = [(row, slot) for row, slot in enumerate(slots) if not self._begun(slot).over]
            if not running:
                break
            steps = self._sims.advance({slot: choose(row, k, slot) for row, slot in running})
            for row, slot in running:
                self._note(result, row, k, slot, steps[slot], after_step)
        for slot, progress in enumerate(self._progress):
            # An episode that waits for its first action was moved too; its start decides everything, so start again.
            if progress is not None and slot not in slots and not progress.steps:
                self._sims.reset(slot, progress.start.reset_id, progress.start.seed)
