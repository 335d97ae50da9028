"""What lies in the records of an arena: one chunk step of a rollout, or a bucket of weights on their way."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np

from embodyrl.types import ByteArray, EnvSpec, PolicySpec

_ALIGN = 64  # one cache line: two writers never share one between fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One array of the arena: `shape` per record."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def record_bytes(self) -> int:
        """Size of the field in one record."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


SEQUENCE, STATE = "sequence", "state"
"""The arena's own fields: which ticket is valid, and whether the record may be read."""
_HEADER = (Field(name=SEQUENCE, dtype="int64"), Field(name=STATE, dtype="uint8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLayout:
    """Fields of a record, stored field by field so that a gather of records is one indexing operation."""

    fields: tuple[Field, ...]

    @property
    def all_fields(self) -> tuple[Field, ...]:
        """The arena's own fields, then those of the record."""
        return _HEADER + self.fields

    @property
    def record_bytes(self) -> int:
        """Size of one record."""
        return sum(f.record_bytes for f in self.all_fields)

    def offsets(self, capacity: int) -> tuple[dict[str, int], int]:
        """Return the byte offset of each field for `capacity` records, and the total size."""
        offsets: dict[str, int] = {}
        end = 0
        for f in self.all_fields:
            offsets[f.name] = end
            end += -(-f.record_bytes * capacity // _ALIGN) * _ALIGN
        return offsets, end


class Column(str):
    """Name of a field that also knows the field's type and the dimensions of one record's part, by name or number."""

    dtype: str
    dims: tuple[str | int, ...]

    def __new__(cls, name: str, dtype: str, *dims: str | int) -> Self:
        column = super().__new__(cls, name)
        column.dtype, column.dims = dtype, dims
        return column

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # between processes the name is enough


class Record:
    """The fields of one chunk step: what `arena[Record.images][record]` and the like mean, said here only.

    K actions of a chunk, A dimensions of an action, L tokens of a chunk, V values of an observation.
    """

    images = Column("images", "uint8", "cameras", "height", "width", 3)
    """Raw pixels of the observation."""
    observed_state = Column("observed_state", "float32", "state_dim")
    """Proprioception, as the environment gives it."""
    instruction = Column("instruction", "uint8", "instruction_bytes")
    """UTF-8, padded (`encode_instruction`)."""
    tokens = Column("tokens", "int64", "L")
    """What was drawn, and is scored again while training."""
    logprob = Column("logprob", "float32", "L")
    """Log-probability of each token under the weights that drew it."""
    value = Column("value", "float32", "V")
    """The critic's, of the observation."""
    action = Column("action", "float32", "K", "A")
    """What the environment is given."""
    version = Column("version", "int64")
    """Number of updates that the weights had seen which acted."""
    reward = Column("reward", "float32", "K")
    terminated = Column("terminated", "bool", "K")
    truncated = Column("truncated", "bool", "K")
    """By the time limit."""
    valid = Column("valid", "bool", "K")
    """The action was executed; those after the end of an episode are not."""
    success = Column("success", "bool", "K")
    advantage = Column("advantage", "float32", "K")
    returns = Column("returns", "float32", "V")
    """Targets of the critic."""
    reply = Column("reply", "uint8", "reply_bytes")
    """The tokens as text, where the task is one (`encode_reply`)."""
    top = Column("top", "uint8", "top_bytes")
    """`PolicyOutput.top`, padded like an instruction."""
    cut_off = Column("cut_off", "bool")
    """The reply was longer than allowed."""
    cost = Column("cost", "int64")
    """Tokens of the sample, prompt included, for micro-batches of even size."""
    components = Column("components", "float32", "components")
    """Parts of the reward (`EnvSpec.components`), summed over the chunk."""
    ref_logprob = Column("ref_logprob", "float32", "L")
    """Log-probability of each token under the reference policy; only where the algorithm asks for it."""


TOP_BYTES = 48
"""Bytes that hold a token (`shown_token`) and its log-probability."""
OBSERVATION = (Record.images, Record.observed_state, Record.instruction)
"""What the policy looks at."""
DECISION = (
    Record.action,
    Record.tokens,
    Record.logprob,
    Record.value,
    Record.version,
    Record.reply,
    Record.top,
    Record.cut_off,
    Record.cost,
)
"""What the policy writes beside an observation."""
STEP_RESULT = (Record.reward, Record.terminated, Record.truncated, Record.valid, Record.success)
"""What a simulator says of each action of a chunk."""


def record_layout(env: EnvSpec, policy: PolicySpec, *, with_reference: bool = False, top: int = 0) -> RecordLayout:
    """Derive the record of one chunk step from what the environment and the policy declare; `top`: rollout.logprobs."""
    height, width = env.image_size
    sizes = {
        "cameras": len(env.cameras),
        "height": height,
        "width": width,
        "state_dim": env.state_dim,
        "instruction_bytes": _instruction_width(env),
        "K": policy.num_action_chunks,
        "A": policy.action_dim,
        "L": policy.tokens_per_chunk,
        "V": policy.value_dim,
        "reply_bytes": policy.reply_bytes,
        "top_bytes": TOP_BYTES * (top + 1) * policy.num_action_chunks if top else 0,
        "components": len(env.components),
    }
    columns = [column for column in vars(Record).values() if isinstance(column, Column)]
    return RecordLayout(
        fields=tuple(
            Field(name=str(c), dtype=c.dtype, shape=tuple(d if isinstance(d, int) else sizes[d] for d in c.dims))
            for c in columns
            if with_reference or c != Record.ref_logprob
        )
    )


def _instruction_width(env: EnvSpec) -> int:
    """Bytes that hold every instruction of an environment, rounded up to 64."""
    longest = env.prompt_bytes or max((len(t.encode("utf-8")) for t in env.instructions or env.tasks), default=1)
    return -(-max(longest, 1) // 64) * 64


def decode_instruction(row: ByteArray) -> str:
    """Read zero-padded UTF-8 bytes."""
    return bytes(row).rstrip(b"\0").decode("utf-8")


@lru_cache(maxsize=256)
def encode_instruction(text: str, width: int) -> ByteArray:
    """Write an instruction as `width` zero-padded UTF-8 bytes; read-only. ValueError: the text does not fit."""
    raw = text.encode("utf-8", errors="replace")
    if len(raw) > width:
        raise ValueError(f"instruction of {len(raw)} bytes does not fit into {width}: {text[:60]!r}.")
    return np.frombuffer(raw.ljust(width, b"\0"), dtype=np.uint8)


def encode_reply(text: str, width: int) -> ByteArray:
    """Write the first `width` UTF-8 bytes of a reply, zero-padded, without a broken character at the end."""
    # Zeros end a text where it is read again.
    raw = text.replace("\0", "").encode("utf-8", errors="replace")[:width]
    return encode_instruction(raw.decode("utf-8", errors="ignore"), width)


BUCKET = "weights"
"""The one field of a bucket."""
BUCKET_BYTES = 64 << 20
_PART_ALIGN = 16


class WeightInfo(NamedTuple):
    """A weight as the process that holds it declares it."""

    name: str
    count: int
    """Elements."""
    dtype: str
    item_bytes: int
    trained: bool


class WeightPart(NamedTuple):
    """Elements `start` to `stop` of a flattened weight, at byte `offset` of a bucket."""

    name: str
    start: int
    stop: int
    offset: int
    dtype: str


def bucket_layout(bucket_bytes: int = BUCKET_BYTES) -> RecordLayout:
    """Layout of an arena whose records are buckets."""
    return RecordLayout(fields=(Field(name=BUCKET, dtype="uint8", shape=(bucket_bytes,)),))


def fill_buckets(weights: Sequence[WeightInfo], bucket_bytes: int) -> Iterator[tuple[WeightPart, ...]]:
    """Deal weights into buckets in their order; one that is too long for the rest of a bucket is cut."""
    bucket: list[WeightPart] = []
    offset = 0
    for weight in weights:
        start = 0
        while start < weight.count:
            offset = -(-offset // _PART_ALIGN) * _PART_ALIGN  # so that a part can be viewed in the weight's dtype
            room = (bucket_bytes - offset) // weight.item_bytes
            if room <= 0:
                yield tuple(bucket)
                bucket, offset = [], 0
                continue
            stop = min(weight.count, start + room)
            bucket.append(WeightPart(weight.name, start, stop, offset, weight.dtype))
            offset += (stop - start) * weight.item_bytes
            start = stop
    if bucket:
        yield tuple(bucket)
