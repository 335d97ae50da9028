"""Weights on their way between processes: buckets of bounded size in an arena of their own."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from embodyrl.channels.layout import Field, RecordLayout

BUCKET = "weights"
"""The one field of a bucket."""
BUCKET_BYTES = 64 << 20
_ALIGN = 16


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
            offset = -(-offset // _ALIGN) * _ALIGN  # so that a part can be viewed in the weight's dtype
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
