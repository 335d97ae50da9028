"""The rollout worker: reads observations in place and writes actions, log-probabilities and values beside them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from embodyrl.channels.arena import Arena, read_observation
from embodyrl.channels.layout import Record, encode_reply
from embodyrl.channels.messages import InferRequest, RankInfo, ValueRequest
from embodyrl.errors import NonFiniteError
from embodyrl.policies.protocol import Policy
from embodyrl.specs import GripperConvention, convert_gripper
from embodyrl.types import ROWS_AT_A_TIME, FloatArray, IntArray


def token_noise(seeds: npt.ArrayLike, chunks: npt.ArrayLike, tokens_per_chunk: int) -> FloatArray:
    """Return uniforms [B, L] in [0, 1) for noise seeds of episodes [B] and chunk indices [B].

    Philox 4x64-10 is counter-based (Salmon et al. 2011): the episode is the key and the chunk the counter, so any
    chunk's noise can be drawn without drawing the ones before it. The numbers are those of numpy's float32 generator,
    which draws from one stream only; here all rows are drawn at once.
    """
    seeds, chunks = np.asarray(seeds, np.uint64), np.asarray(chunks, np.uint64)
    if len(seeds) < _MANY:
        return _few_rows(seeds, chunks, tokens_per_chunk)
    shape = (len(seeds), -(-tokens_per_chunk // 8))
    # Words 0 and 2 of the counter, and 3 and 1. The first word counts the blocks of a chunk, from 1 on.
    even, odd = np.zeros((2, 2, *shape), np.uint64)
    even[0], odd[0] = np.arange(1, shape[1] + 1), chunks[:, None]
    key = np.stack([np.zeros(shape, np.uint64), np.broadcast_to(seeds[:, None], shape)])
    for _ in range(10):
        # The two halves of a round at once: `[::-1]` swaps which product goes to which word.
        even, odd = (_high(_FACTORS, even) ^ odd ^ key)[::-1], _FACTORS * even
        key = key + _KEY_STEPS
    # Each number of 64 bits gives two of 32, the low one first, of which 24 bits are used.
    bits = np.stack([even[0], odd[1], even[1], odd[0]], axis=-1).astype("<u8").view("<u4").reshape(len(seeds), -1)
    return (bits[:, :tokens_per_chunk] >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


_MANY = 32
"""Rows from which on arrays are faster."""
_FACTORS = np.array([0xD2E7470EE14C6C93, 0xCA5A826395121157], np.uint64)[:, None, None]
_KEY_STEPS = np.array([0xBB67AE8584CAA73B, 0x9E3779B97F4A7C15], np.uint64)[:, None, None]


def _high(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The upper half of the 128 bits of a product."""
    half, low = np.uint64(32), np.uint64(2**32 - 1)
    a1, a0, b1, b0 = a >> half, a & low, b >> half, b & low
    across = a1 * b0 + (a0 * b0 >> half)
    return a1 * b1 + (across >> half) + (a0 * b1 + (across & low) >> half)


def _few_rows(seeds: npt.NDArray[np.uint64], chunks: npt.NDArray[np.uint64], tokens_per_chunk: int) -> FloatArray:
    philox, generator, state = _stream(threading.get_ident())
    key, counter = state["state"]["key"], state["state"]["counter"]
    noise = np.empty((len(seeds), tokens_per_chunk), dtype=np.float32)
    for row, (seed, chunk) in enumerate(zip(seeds.tolist(), chunks.tolist(), strict=True)):
        key[0], counter[3] = seed, chunk
        philox.state = state
        generator.random(out=noise[row], dtype=np.float32)
    return noise


@lru_cache(maxsize=8)
def _stream(thread: int) -> tuple[np.random.Philox, np.random.Generator, Any]:
    """A generator for one thread, and the state to set: a new one asks the system for entropy that nobody uses."""
    philox = np.random.Philox(key=0)
    state = cast(Any, philox.state)
    # Lists: its setter reads number by number, which takes twice as long of arrays.
    state["state"], state["buffer"] = {"key": [0, 0], "counter": [0, 0, 0, 0]}, [0, 0, 0, 0]
    return philox, np.random.Generator(philox), state


@dataclass(frozen=True, slots=True)
class _Plan:
    """A chunk of a slot whose actions are executed one record at a time."""

    episode: int
    """Its noise seed."""
    begin: int
    """The env step that it was chosen at."""
    actions: FloatArray
    """[K, A]"""


class RolloutWorker:
    """Acts with the policy that it shares with the actor."""

    def __init__(
        self,
        policy: Policy,
        arena: Arena,
        gripper: GripperConvention | None,
        rank_info: RankInfo,
        *,
        single_step: bool = False,
    ) -> None:
        """Where records are single steps, a chunk is executed in as many of them before the policy is asked again."""
        self._policy = policy
        self._rank_info = rank_info
        self._arena = arena
        self._gripper = gripper
        self._steps = policy.spec.num_action_chunks if single_step else 1
        self._plans: dict[int, _Plan] = {}

    def infer(self, request: InferRequest) -> None:
        """Choose one chunk per ticket and write it beside its observation.

        Raises:
            NonFiniteError: the policy's outputs are not finite. Tokens drawn from NaN look like any others, so this is
                the place where diverged weights are noticed even if no later update looks at them.
        """
        arena, policy = self._arena, self._policy
        steps = request.chunks
        if self._steps > 1:
            request, steps = self._go_on(request)
        if not len(request.tickets):
            return
        records = arena.read(request.tickets)
        # In a deterministic run each slot has its row in every batch: a row's numbers depend on its place too.
        rows = _rows(request.rows, request.padded_size, len(records))
        noise = None
        if not request.greedy:
            noise = token_noise(request.noise_seeds, request.chunks, policy.spec.tokens_per_chunk)
            noise = _pad(noise, rows, request.padded_size)
        # Filling rows are copies of a real observation: whatever the policy does with them, it is numerically harmless.
        observation = read_observation(arena, _pad(records, rows, request.padded_size))
        out = policy.act(observation, noise=noise, temperature=request.temperature)
        own = rows if request.padded_size else slice(None)
        actions, logprob, value = np.array(out.actions[own]), out.logprob[own], out.value[own]
        for what, values in (("action", actions), ("log-probability", logprob), ("value", value)):
            if not np.isfinite(values).all():
                raise NonFiniteError(
                    f"The policy produced a non-finite {what}. Likely cause: weights that diverged (lower "
                    "actor.optim.lr, actor.optim.value_lr or actor.optim.clip_grad), or broken action statistics. "
                    "Older checkpoints are intact."
                )
        # After the check: a NaN would become a closed or an open gripper without a trace.
        convert_gripper(actions, policy.spec.gripper, self._gripper)
        arena[Record.action][records] = actions
        if self._steps > 1:
            about = zip(request.rows, request.noise_seeds, steps, actions, strict=True)
            self._plans |= {int(row): _Plan(int(seed), int(step), own) for row, seed, step, own in about}
        arena[Record.tokens][records] = out.tokens[own]
        arena[Record.logprob][records] = logprob
        arena[Record.value][records] = value
        arena[Record.version][records] = request.version
        arena[Record.cost][records] = 1 if out.cost is None else out.cost[own]
        if width := arena[Record.reply].shape[1]:
            assert out.cut_off is not None
            arena[Record.reply][records] = np.stack([encode_reply(out.replies[row], width) for row in rows])
            arena[Record.cut_off][records] = out.cut_off[rows]
        if width := arena[Record.top].shape[1]:
            arena[Record.top][records] = np.stack([encode_reply(out.top[row], width) for row in rows])

    def _go_on(self, request: InferRequest) -> tuple[InferRequest, IntArray]:
        """Write the next action where a chunk is under way; returns what is left to ask, and at which env steps."""
        waiting: list[int] = []
        about = zip(request.rows, request.noise_seeds, request.chunks, strict=True)
        for place, (row, seed, step) in enumerate(about):
            plan = self._plans.get(int(row))
            done = 0 if plan is None or plan.episode != int(seed) else int(step) - plan.begin
            if plan is not None and 0 < done < self._steps:
                (record,) = self._arena.read(request.tickets[place : place + 1])
                self._arena[Record.action][record, 0] = plan.actions[done]
                for name in (Record.tokens, Record.logprob, Record.value):
                    self._arena[name][record] = 0  # what stood there was said of another record
            else:
                waiting.append(place)
        picked = {name: np.asarray(getattr(request, name))[waiting] for name in ("tickets", "noise_seeds", "rows")}
        steps = np.asarray(request.chunks)[waiting]
        # The noise of a chunk is that of an evaluation, which counts chunks.
        return replace(request, chunks=steps // self._steps, **picked), steps

    def values(self, request: ValueRequest) -> None:
        """Write value estimates of final observations, for bootstrapping."""
        size = request.padded_size or ROWS_AT_A_TIME
        for part in self._rank_info.share(len(request.tickets), size):
            records = self._arena.read(request.tickets[part])
            rows = np.arange(len(records))
            padded = _pad(records, rows, request.padded_size)
            self._arena[Record.value][records] = self._policy.values(read_observation(self._arena, padded))[rows]


def _rows(wanted: Sequence[int] | IntArray, padded_size: int, count: int) -> IntArray:
    if not padded_size:
        return np.arange(count)
    rows = np.asarray(wanted, dtype=np.int64)
    assert len(np.unique(rows)) == count, f"two tickets want the same row: {wanted}"
    assert rows.max() < padded_size, f"row {rows.max()} of {padded_size}"
    return rows


def _pad(values: np.ndarray, rows: IntArray, padded_size: int) -> np.ndarray:
    """Place values at their rows of a batch of fixed size; the other rows repeat the first value."""
    if not padded_size:
        return values
    padded = np.repeat(values[:1], padded_size, axis=0)
    padded[rows] = values
    return padded
