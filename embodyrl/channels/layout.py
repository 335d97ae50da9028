"""Layout of arena records: one chunk step of a rollout, or a bucket of weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np

from embodyrl.types import ByteArray, EnvSpec, PolicySpec

_ALIGN = 64  # size of a cache line, so that writers of different fields share no cache line


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Field of a record, with its name, dtype and shape; the arena stores it as an array [capacity, *shape]."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def record_bytes(self) -> int:
        """Size in bytes of the field in one record."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


SEQUENCE, STATE = "sequence", "state"
"""Fields that the arena adds to each record: sequence number of the valid reference, and state of the record."""
_HEADER = (Field(name=SEQUENCE, dtype="int64"), Field(name=STATE, dtype="uint8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLayout:
    """Memory layout of records: one array per field, so that records are gathered by one indexing operation."""

    fields: tuple[Field, ...]

    @property
    def all_fields(self) -> tuple[Field, ...]:
        """Fields that the arena adds (sequence and state), followed by `fields`."""
        return _HEADER + self.fields

    @property
    def record_bytes(self) -> int:
        """Size of one record in bytes."""
        return sum(f.record_bytes for f in self.all_fields)

    def offsets(self, capacity: int) -> tuple[dict[str, int], int]:
        """Return the byte offset of each field's array for `capacity` records, and the total size in bytes."""
        offsets: dict[str, int] = {}
        end = 0
        for f in self.all_fields:
            offsets[f.name] = end
            end += -(-f.record_bytes * capacity // _ALIGN) * _ALIGN
        return offsets, end


class Column(str):
    """Field name with a dtype and dimensions, which are numbers or names of sizes (see `build_record_layout`)."""

    dtype: str
    dims: tuple[str | int, ...]

    def __new__(cls, name: str, dtype: str, *dims: str | int) -> Self:
        column = super().__new__(cls, name)
        column.dtype, column.dims = dtype, dims
        return column

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # pickled as its name


class Record:
    """Field names of a record, which stores one chunk step; for example `arena[Record.images][record]`.

    Dimensions: K actions per chunk, A numbers per action, L tokens per chunk, V values per observation.
    """

    images = Column("images", "uint8", "cameras", "height", "width", 3)
    """Camera images of the observation, as raw pixels."""
    observed_state = Column("observed_state", "float32", "state_dim")
    """Proprioceptive state of the observation, unnormalized."""
    instruction = Column("instruction", "uint8", "instruction_bytes")
    """Instruction as padded UTF-8 (`encode_instruction`)."""
    tokens = Column("tokens", "int64", "L")
    """Sampled tokens; training recomputes their log-probabilities."""
    logprob = Column("logprob", "float32", "L")
    """Log-probability of each token under the weights that sampled it."""
    value = Column("value", "float32", "V")
    """Value of the observation, predicted by the value head."""
    action = Column("action", "float32", "K", "A")
    """Action executed by the environment."""
    version = Column("version", "int64")
    """Version of the weights that sampled the chunk: the number of updates before sampling."""
    reward = Column("reward", "float32", "K")
    terminated = Column("terminated", "bool", "K")
    truncated = Column("truncated", "bool", "K")
    """True if a limit truncated the episode after this action."""
    valid = Column("valid", "bool", "K")
    """True if the action was executed; False for actions after the end of an episode."""
    success = Column("success", "bool", "K")
    advantage = Column("advantage", "float32", "K")
    returns = Column("returns", "float32", "V")
    """Value targets."""
    reply = Column("reply", "uint8", "reply_bytes")
    """Reply as text, for text tasks (`encode_reply`)."""
    top = Column("top", "uint8", "top_bytes")
    """Most probable tokens with log-probabilities (`PolicyOutput.top`), zero-padded UTF-8."""
    cut_off = Column("cut_off", "bool")
    """True if the reply hit the token limit."""
    cost = Column("cost", "int64")
    """Number of tokens of prompt and reply, used to form micro-batches of equal size."""
    components = Column("components", "float32", "components")
    """Reward components (`RewardSpec.components`), summed over the chunk."""
    resized = Column("resized", "uint8", "resized_images", "resized", "resized", 3)
    """Images at the size of the policy's input, which inference writes for the update."""
    ref_logprob = Column("ref_logprob", "float32", "L")
    """Log-probability of each token under the reference policy, if the algorithm needs it."""


TOP_BYTES = 48
"""Bytes reserved in `Record.top` for the text of one token and its log-probability."""
OBSERVATION = (Record.images, Record.observed_state, Record.instruction)
"""Fields that the policy reads."""
POLICY_OUTPUT = (
    Record.action,
    Record.tokens,
    Record.logprob,
    Record.value,
    Record.version,
    Record.reply,
    Record.top,
    Record.cut_off,
    Record.cost,
    Record.resized,
)
"""Fields that the policy writes."""
STEP_RESULT = (Record.reward, Record.terminated, Record.truncated, Record.valid, Record.success)
"""Fields that the env worker writes for each action of a chunk."""


def build_record_layout(
    env: EnvSpec, policy: PolicySpec, *, with_reference: bool = False, with_resized: bool = False, top: int = 0
) -> RecordLayout:
    """Derive the record layout of a chunk step from the specs of environment and policy.

    Args:
        env: spec of the environment.
        policy: spec of the policy.
        with_reference: store the log-probabilities of a reference policy.
        with_resized: store images as the policy resizes them, if that makes them smaller.
        top: number of most probable tokens to store (rollout.logprobs).
    """
    height, width = env.cameras.size
    resized = policy.inputs.resized if with_resized and policy.inputs.resized < min(height, width) else 0
    sizes = {
        "cameras": len(env.cameras.names),
        "height": height,
        "width": width,
        "resized_images": policy.inputs.num_images if resized else 0,
        "resized": resized,
        "state_dim": env.state_dim,
        "instruction_bytes": _compute_instruction_width(env),
        "K": policy.num_action_chunks,
        "A": policy.action_dim,
        "L": policy.tokens_per_chunk,
        "V": policy.value_dim,
        "reply_bytes": policy.reply_bytes,
        "top_bytes": TOP_BYTES * (top + 1) * policy.num_action_chunks if top else 0,
        "components": len(env.reward.components),
    }
    columns = [column for column in vars(Record).values() if isinstance(column, Column)]
    return RecordLayout(
        fields=tuple(
            Field(name=str(c), dtype=c.dtype, shape=tuple(d if isinstance(d, int) else sizes[d] for d in c.dims))
            for c in columns
            if with_reference or c != Record.ref_logprob
        )
    )


def _compute_instruction_width(env: EnvSpec) -> int:
    """Return the length in bytes of the environment's longest instruction, rounded up to a multiple of 64."""
    longest = env.text.prompt_bytes or max((len(t.encode("utf-8")) for t in env.instructions or env.tasks), default=1)
    return -(-max(longest, 1) // 64) * 64


def decode_instruction(row: ByteArray) -> str:
    """Decode an instruction from zero-padded UTF-8 bytes."""
    return bytes(row).rstrip(b"\0").decode("utf-8")


@lru_cache(maxsize=256)
def encode_instruction(text: str, width: int) -> ByteArray:
    """Encode an instruction as `width` zero-padded UTF-8 bytes (read-only).

    Raises:
        ValueError: the text is too long.
    """
    raw = text.encode("utf-8", errors="replace")
    if len(raw) > width:
        raise ValueError(f"The instruction {text[:60]!r} has {len(raw)} bytes; the limit is {width}. Shorten it.")
    return np.frombuffer(raw.ljust(width, b"\0"), dtype=np.uint8)


def encode_reply(text: str, width: int) -> ByteArray:
    """Encode the first `width` UTF-8 bytes of a reply, zero-padded, without a partial character at the end."""
    # Decoding stops at the first zero.
    raw = text.replace("\0", "").encode("utf-8", errors="replace")[:width]
    return encode_instruction(raw.decode("utf-8", errors="ignore"), width)


BUCKET = "weights"
"""Name of the only field of a bucket, a record of raw bytes for weight transfer."""
BUCKET_BYTES = 64 << 20
_PART_ALIGN = 16


class WeightInfo(NamedTuple):
    """Name, dtype and size of a weight tensor."""

    name: str
    count: int
    """Number of elements."""
    dtype: str
    item_bytes: int
    trained: bool


class WeightPart(NamedTuple):
    """Elements `start` to `stop` of a flattened weight tensor, stored at bytes `offset` to `end` of a bucket."""

    name: str
    start: int
    stop: int
    offset: int
    end: int
    dtype: str


def build_bucket_layout(bucket_bytes: int = BUCKET_BYTES) -> RecordLayout:
    """Return the layout of an arena whose records are buckets for weight transfer."""
    return RecordLayout(fields=(Field(name=BUCKET, dtype="uint8", shape=(bucket_bytes,)),))


def fill_buckets(weights: Sequence[WeightInfo], bucket_bytes: int) -> Iterator[tuple[WeightPart, ...]]:
    """Yield the weight parts of each bucket; weights are assigned in order, and split if they do not fit."""
    bucket: list[WeightPart] = []
    offset = 0
    for weight in weights:
        start = 0
        while start < weight.count:
            # aligned, so that a part can be viewed in the weight's dtype
            offset = -(-offset // _PART_ALIGN) * _PART_ALIGN
            room = (bucket_bytes - offset) // weight.item_bytes
            if room <= 0:
                yield tuple(bucket)
                bucket, offset = [], 0
                continue
            stop = min(weight.count, start + room)
            end = offset + (stop - start) * weight.item_bytes
            bucket.append(WeightPart(weight.name, start, stop, offset, end, weight.dtype))
            offset, start = end, stop
    if bucket:
        yield tuple(bucket)
