"""What one transition record holds, and where each field lies in the arena."""

from dataclasses import dataclass

import numpy as np

from embodyrl.types import EnvSpec, PolicySpec, instruction_width

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


_HEADER = (
    Field(name="sequence", dtype="uint64"),
    Field(name="state", dtype="uint8"),
)


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


def record_layout(env: EnvSpec, policy: PolicySpec, *, with_reference: bool = False) -> RecordLayout:
    """Derive the record of one chunk step from what the environment and the policy declare."""
    k, a, tokens, v = policy.num_action_chunks, policy.action_dim, policy.tokens_per_chunk, policy.value_dim
    height, width = env.image_size
    fields = [
        Field(name="images", dtype="uint8", shape=(len(env.cameras), height, width, 3)),
        Field(name="observed_state", dtype="float32", shape=(env.state_dim,)),
        Field(name="instruction", dtype="uint8", shape=(instruction_width(env),)),
        Field(name="tokens", dtype="int64", shape=(tokens,)),
        Field(name="logprob", dtype="float32", shape=(tokens,)),
        Field(name="value", dtype="float32", shape=(v,)),
        Field(name="action", dtype="float32", shape=(k, a)),
        Field(name="version", dtype="int64"),
        Field(name="reward", dtype="float32", shape=(k,)),
        Field(name="terminated", dtype="bool", shape=(k,)),
        Field(name="truncated", dtype="bool", shape=(k,)),
        Field(name="valid", dtype="bool", shape=(k,)),
        Field(name="success", dtype="bool", shape=(k,)),
        Field(name="advantage", dtype="float32", shape=(k,)),
        Field(name="returns", dtype="float32", shape=(v,)),
        Field(name="reply", dtype="uint8", shape=(policy.reply_bytes,)),
        Field(name="cut_off", dtype="bool"),
        Field(name="cost", dtype="int64"),
        Field(name="components", dtype="float32", shape=(len(env.components),)),
    ]
    if with_reference:
        fields.append(Field(name="ref_logprob", dtype="float32", shape=(tokens,)))
    return RecordLayout(fields=tuple(fields))
