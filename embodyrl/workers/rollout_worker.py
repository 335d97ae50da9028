"""The rollout worker: reads observations in place and writes actions, log-probabilities and values beside them."""

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from embodyrl.channels.arena import Arena, Fields
from embodyrl.channels.layout import Record, decode_instruction, encode_reply
from embodyrl.errors import NonFiniteError
from embodyrl.policies.protocol import Policy
from embodyrl.types import FloatArray, GripperConvention, IntArray, Observation
from embodyrl.workers.messages import InferRequest, RankInfo, ValueRequest


def token_noise(keys: Sequence[tuple[int, int]], tokens_per_chunk: int) -> FloatArray:
    """Return uniforms [B, L] in [0, 1) for (noise seed of the episode, chunk index) pairs.

    Philox is counter-based (Salmon et al. 2011): the episode is the key and the chunk the counter, so any chunk's
    noise can be drawn without drawing the ones before it.
    """
    philox = np.random.Philox(key=0)
    generator, state = np.random.Generator(philox), cast(Any, philox.state)
    noise = np.empty((len(keys), tokens_per_chunk), dtype=np.float32)
    for row, (seed, chunk) in enumerate(keys):
        # A new Philox asks the system for entropy that nobody uses, which takes longer than all the rest.
        state["state"]["key"][0], state["state"]["counter"][3] = seed, chunk
        philox.state = state
        noise[row] = generator.random(tokens_per_chunk, dtype=np.float32)
    return noise


def convert_gripper(actions: FloatArray, source: GripperConvention | None, target: GripperConvention | None) -> None:
    """Rewrite the gripper dimension of actions [..., A] in place from the policy's meaning to the environment's."""
    if source is None or target is None:
        return
    openness = (actions[..., source.index] - source.closed) / (source.open - source.closed)
    if target.binary:
        openness = (openness > 0.5).astype(actions.dtype)
    actions[..., target.index] = target.closed + openness * (target.open - target.closed)


def read_observation(arena: Fields, records: IntArray) -> Observation:
    """Gather a batch of stored observations."""
    words = arena[Record.instruction][records]
    # Mostly one task for all: one comparison is a hundred times cheaper than as many texts.
    same = len(words) > 0 and bool((words == words[0]).all())
    return Observation(
        images=arena[Record.images][records],
        state=arena[Record.observed_state][records],
        instructions=(decode_instruction(words[0]),) * len(words) if same else tuple(map(decode_instruction, words)),
    )


class RolloutWorker:
    """Acts with the policy that it shares with the actor."""

    def __init__(self, policy: Policy, arena: Arena, gripper: GripperConvention | None, rank_info: RankInfo) -> None:
        self._policy = policy
        self._rank_info = rank_info
        self._arena = arena
        self._gripper = gripper

    def infer(self, request: InferRequest) -> None:
        """Choose one chunk per item and write it beside its observation.

        Raises:
            NonFiniteError: the policy's outputs are not finite. Tokens drawn from NaN look like any others, so this is
                the place where diverged weights are noticed even if no later update looks at them.
        """
        arena, policy = self._arena, self._policy
        records = arena.read([item.ticket for item in request.items])
        rows = _rows([item.row for item in request.items], request.padded_size)
        noise = None
        if not request.greedy:
            keys = [(item.noise_seed, item.chunk) for item in request.items]
            noise = _pad(token_noise(keys, policy.spec.tokens_per_chunk), rows, request.padded_size)
        observation = read_observation(arena, _pad(records, rows, request.padded_size))
        out = policy.act(observation, noise=noise, temperature=request.temperature)
        actions = out.actions[rows]
        for what, values in (("action", actions), ("log-probability", out.logprob[rows]), ("value", out.value[rows])):
            if not np.isfinite(values).all():
                raise NonFiniteError(
                    f"The policy produced a non-finite {what}. Likely cause: weights that diverged (lower "
                    "actor.optim.lr, actor.optim.value_lr or actor.optim.clip_grad), or broken action statistics. "
                    "Older checkpoints are intact."
                )
        convert_gripper(actions, policy.spec.gripper, self._gripper)
        arena[Record.action][records] = actions
        arena[Record.tokens][records] = out.tokens[rows]
        arena[Record.logprob][records] = out.logprob[rows]
        arena[Record.value][records] = out.value[rows]
        arena[Record.version][records] = request.version
        arena[Record.cost][records] = 1 if out.cost is None else out.cost[rows]
        if width := arena[Record.reply].shape[1]:
            assert out.cut_off is not None
            arena[Record.reply][records] = np.stack([encode_reply(out.replies[row], width) for row in rows])
            arena[Record.cut_off][records] = out.cut_off[rows]

    def values(self, request: ValueRequest) -> None:
        """Write value estimates of final observations, for bootstrapping."""
        size = request.padded_size or 32
        for part in self._rank_info.share(len(request.tickets), size):
            records = self._arena.read(request.tickets[part])
            rows = np.arange(len(records))
            padded = _pad(records, rows, request.padded_size)
            self._arena[Record.value][records] = self._policy.values(read_observation(self._arena, padded))[rows]


def _rows(wanted: Sequence[int], padded_size: int) -> IntArray:
    if not padded_size:
        return np.arange(len(wanted))
    rows = np.asarray(wanted, dtype=np.int64)
    assert len(set(wanted)) == len(wanted), f"two items want the same row: {wanted}"
    assert rows.max() < padded_size, f"row {rows.max()} of {padded_size}"
    return rows


def _pad(values: np.ndarray, rows: IntArray, padded_size: int) -> np.ndarray:
    """Place values at their rows of a batch of fixed size; the other rows repeat the first value."""
    if not padded_size:
        return values
    padded = np.repeat(values[:1], padded_size, axis=0)
    padded[rows] = values
    return padded


def even_parts(total: int, largest: int, number: int | None = None) -> list[int]:
    """Split `total` into the fewest parts of at most `largest`, or into `number`, as equal as possible.

    >>> even_parts(10, 4), even_parts(10, 4, 2)
    ([4, 3, 3], [5, 5])
    """
    if total == 0:
        return []
    count = math.ceil(total / largest) if number is None else min(number, total)
    return [total // count + (i < total % count) for i in range(count)]
