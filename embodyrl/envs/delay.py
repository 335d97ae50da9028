"""Inference delay: a chunk begins some env steps after its observation; until then, the previous chunk continues.

A chunk has K actions. Its last `overlap` actions are for env steps that the next chunk also covers, so there is one
observation every s = K - overlap steps. The delay d of a chunk is at most min(s, overlap). The chunk for the
observation of step t executes its actions d..s-1 at steps t+d..t+s-1. Until the next chunk begins, after delay d', its
actions s..s+d'-1 follow. The first chunk of an episode has no delay: its actions start at 0. Delays are numbers of env
steps, so the results do not depend on the speed of the policy.

The record of a chunk contains the results of exactly the actions that this chunk executed; `valid` is False for all
others. Algorithms therefore need no changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.protocol import AfterStep, Env, EnvContext
from embodyrl.envs.settings import EnvSettings, RewardSettings
from embodyrl.errors import ConfigError, EnvError
from embodyrl.types import ByteArray, ChunkResult, CommittedSpec, EnvSpec, EpisodeStart, FloatArray, IntArray

WINDOW = 10
"""Number of recent delays whose maximum the policy observes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Distribution of the inference delay in env steps, and the overlap of consecutive chunks."""

    low: int
    high: int
    """Maximum delay in env steps; delays are sampled uniformly from low..high."""
    overlap: int
    """Number of actions at the end of a chunk that cover the same env steps as the start of the next chunk."""
    observed: bool
    """True if the state contains the committed actions: those of the previous chunk that will still be executed."""

    def declare(self, spec: EnvSpec, chunk: int) -> EnvSpec:
        """Return the spec of the delayed environment (see `with_delay`)."""
        return with_delay(spec, self, chunk)

    def original(self, spec: EnvSpec) -> EnvSpec:
        """Return the spec without committed actions (see `without_committed`)."""
        return without_committed(spec)

    def wrap(self, env: ChunkedEnv, num_slots: int) -> Env:
        """Wrap the environment in a `DelayedEnv`."""
        return DelayedEnv(env, self, num_slots)

    def fits(self, chunk: int) -> bool:
        """Return whether chunks of `chunk` actions are long enough for the maximum delay and the overlap."""
        return self.overlap >= self.high and chunk - self.overlap >= max(1, self.high)

    def delays(self, seed: int, reset_id: int, chunk: int) -> tuple[int, int]:
        """Return the delay of chunk number `chunk` of an episode, and the delay that the policy observes.

        The observed delay is the maximum over the last `WINDOW` delayed chunks, or `high` before the first of them.
        """
        if chunk == 0:
            return 0, 0
        first = max(1, chunk - WINDOW)
        drawn = [self._draw(seed, reset_id, number) for number in range(first, chunk + 1)]
        return drawn[-1], max(drawn[:-1], default=self.high)

    def _draw(self, seed: int, reset_id: int, chunk: int) -> int:
        if self.low == self.high:
            return self.low
        return int(np.random.default_rng([seed, reset_id, chunk]).integers(self.low, self.high + 1))


def delay_of(cfg: EnvSettings, context: EnvContext) -> Timing:
    """Return the delay and overlap from the settings of an environment and of the run."""
    assert isinstance(cfg, RewardSettings)
    low, high = cfg.delay
    overlap = high if context.overlap is None else context.overlap
    observed = context.observe_committed or cfg.control.observe_committed
    return Timing(low=low, high=high, overlap=overlap, observed=observed)


def with_delay(spec: EnvSpec, timing: Timing, chunk: int) -> EnvSpec:
    """Return the spec of the delayed environment, for a policy with `chunk` actions per chunk (0: unknown).

    Raises:
        ConfigError: the chunks are too short, or the simulator can only step all its slots at once.
    """
    problems = []
    if chunk and not timing.fits(chunk):
        problems.append(
            f"rollout.chunk_overlap={timing.overlap} and env.control.latency_steps={timing.high} do not fit into "
            f"chunks of {chunk} actions: the overlap and the remaining actions must each be at least the delay. Set "
            f"model.num_action_chunks to {max(timing.overlap, timing.high) + max(1, timing.high)} or more, or lower "
            "the delay."
        )
    if spec.simulator.lockstep:
        problems.append(
            f"env '{spec.name}' can only step all its slots at once, but a delay needs steps of single slots. Set "
            "env.control.latency_steps=0 and leave out rollout.chunk_overlap, or use another env."
        )
    if problems:
        raise ConfigError(problems)
    # A saved state of the simulator would lack the actions of the previous chunk.
    spec = replace(without_committed(spec), simulator=replace(spec.simulator, saves_state=False))
    if not timing.observed:
        return spec
    committed = CommittedSpec(rows=timing.overlap, delay=timing.high)
    return replace(spec, state_dim=spec.state_dim + committed.width(spec.action.dim), committed=committed)


def without_committed(spec: EnvSpec) -> EnvSpec:
    """Return the spec of the same environment without committed actions in the state."""
    return replace(spec, state_dim=spec.own_state_dim, committed=None)


def committed_columns(delay: int, left: FloatArray | None, width: int) -> FloatArray:
    """Return the committed actions and the delay as state columns [width] (see `CommittedSpec`).

    Args:
        delay: delay that the policy observes.
        left: [overlap, A] actions of the previous chunk after the observation; None: there is no previous chunk.
        width: number of columns, at least 2 + overlap A.
    """
    columns = np.zeros(width, np.float32)
    if left is not None:
        columns[2 : 2 + left.size] = left.ravel()
    columns[:2] = delay, 0 if left is None else len(left)
    return columns


@dataclass
class _Running:
    """Current episode of a slot."""

    start: EpisodeStart
    chunks: int = 0
    """Number of chunks of the episode that were executed."""
    begin: int = 0
    """Index, in the next chunk, of the first action that will be executed."""
    reported: int = 0
    """Delay that the policy observes for the next chunk."""
    left: FloatArray | None = None
    """[overlap, A] last actions of the previous chunk, planned for the env steps after the observation."""


class DelayedEnv:
    """Wrapper that delays the action chunks of another environment (implements `Env`)."""

    def __init__(self, inner: ChunkedEnv, timing: Timing, num_slots: int) -> None:
        self.inner = inner
        """The wrapped environment, which has no delay."""
        self._timing = timing
        self.spec = with_delay(inner.spec, timing, 0)
        self.task_limit = inner.task_limit
        own = inner.spec
        self._images = np.zeros((num_slots, len(own.cameras.names), *own.cameras.size, 3), np.uint8)
        self._state = np.zeros((num_slots, own.state_dim), np.float32)
        self._running: dict[int, _Running] = {}

    def reset(self, slots: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        """Start an episode in each slot."""
        self.inner.reset(slots, starts)
        self._running |= {slot: _Running(start) for slot, start in zip(slots, starts, strict=True)}
        self._look(slots)

    def solved_at_reset(self, slots: Sequence[int]) -> list[int]:
        """Return the slots whose goal was reached when their episode began (see `ReportsSolvedStarts`)."""
        return self.inner.solved_at_reset(slots)

    def step_chunk(
        self, slots: Sequence[int], actions: FloatArray, *, after_step: AfterStep | None = None
    ) -> ChunkResult:
        """Execute the chunks [n, K, A] without the actions that the previous or the next chunk replaces.

        Raises:
            EnvError: the chunk is too short for the delay; see also `Env.step_chunk`.
        """
        count, overlap = actions.shape[1], self._timing.overlap
        if not self._timing.fits(count):
            raise EnvError(
                f"env '{self.spec.name}': chunks of {count} actions are too short for an overlap of {overlap} and a "
                f"delay of {self._timing.high}. Set env.control.latency_steps=0, or use longer chunks."
            )
        result = ChunkResult.empty(len(slots), count, parts=len(self.spec.reward.components))
        period = count - overlap
        groups: dict[tuple[int, int], list[int]] = {}
        for row, slot in enumerate(slots):
            episode = self._running[slot]
            delay, reported = self._timing.delays(episode.start.seed, episode.start.reset_id, episode.chunks + 1)
            # A policy that observes a longer delay predicts only the actions after it.
            following = max(delay, reported) if self._timing.observed else delay
            groups.setdefault((episode.begin, following), []).append(row)
            episode.chunks, episode.begin, episode.reported = episode.chunks + 1, following, reported
            episode.left = actions[row, period:].copy()
        for (begin, following), rows in groups.items():
            running = self._run(result, rows, slots, actions, slice(begin, period), after_step)
            self._look([slots[row] for row in rows])
            self._run(result, running, slots, actions, slice(period, period + following), after_step)
        return result

    def _run(
        self,
        result: ChunkResult,
        rows: list[int],
        slots: Sequence[int],
        actions: FloatArray,
        part: slice,
        after_step: AfterStep | None,
    ) -> list[int]:
        """Execute the slice `part` of each chunk in `rows`; return the rows whose episode continues."""
        if part.start == part.stop or not rows:
            return rows
        chosen = [slots[row] for row in rows]
        done = self.inner.step_chunk(chosen, actions[rows, part], after_step=after_step)
        for name in ("reward", "terminated", "truncated", "valid", "success"):
            getattr(result, name)[rows, part] = getattr(done, name)
        if result.components is not None and done.components is not None:
            result.components[rows] += done.components
        result.reward_errors.update(done.reward_errors)
        return [row for row, ended in zip(rows, done.done.tolist(), strict=True) if not ended]

    def expert_chunk(
        self,
        slots: Sequence[int],
        num_actions: int,
        *,
        noise: float,
        instead: FloatArray | None = None,
        after_step: AfterStep | None = None,
    ) -> tuple[FloatArray, ChunkResult]:
        """Run the scripted expert without delay, one action per env step (see `Env.expert_chunk`)."""
        found = self.inner.expert_chunk(slots, num_actions, noise=noise, instead=instead, after_step=after_step)
        self._look(slots)
        return found

    def _look(self, slots: Sequence[int]) -> None:
        """Store the current observations, from which the policy computes the next chunk."""
        self.inner.observe(slots, self._images, self._state, np.array(slots, np.int64))

    def observe(self, slots: Sequence[int], images: ByteArray, state: FloatArray, rows: IntArray | None = None) -> None:
        """Write the observation of the next chunk of each slot, with the committed actions (see `Env.observe`)."""
        rows = np.arange(len(slots)) if rows is None else rows
        for slot, row in zip(slots, rows.tolist(), strict=True):
            own = self._state.shape[1]
            images[row], state[row, :own] = self._images[slot], self._state[slot]
            if self._timing.observed:
                episode = self._running[slot]
                state[row, own:] = committed_columns(episode.reported, episode.left, state.shape[1] - own)

    def instruction(self, slot: int) -> str:
        """Return the language instruction of the slot's current episode."""
        return self.inner.instruction(slot)

    def render(self, slot: int) -> np.ndarray:
        """Return an upright RGB frame [H, W, 3] uint8 of the slot."""
        return self.inner.render(slot)

    def close(self) -> None:
        """Free the simulators; idempotent."""
        self.inner.close()
