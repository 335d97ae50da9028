"""Interface of data sets to convert: a description, and episodes as arrays by column."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np


class Kind(StrEnum):
    """Type of the values of a column."""

    image = "image"
    numbers = "numbers"
    text = "text"


@dataclass(frozen=True, slots=True)
class Column:
    """Description of a column, which has one value per step."""

    kind: Kind
    shape: tuple[int, ...] = ()
    """Shape of one value: (H, W, C) for an image, () for a scalar or a text."""

    @property
    def size(self) -> int:
        """Number of scalars per step."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventions:
    """Defaults of a known layout: column names, gripper convention and image rotation; settings override them."""

    keys: Mapping[str, str] = field(default_factory=dict)
    gripper: tuple[float, float] | None = None
    """Action values that open and close the gripper."""
    image_rotation_deg: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Description of a source data set: format, size, columns and conventions."""

    kind: str
    """Name of the format, for the start banner."""
    name: str
    """Name of the environment or robot."""
    episodes: int
    columns: Mapping[str, Column]
    fps: float | None = None
    conventions: Conventions = Conventions()
    left_out: str = ""
    """Episodes or steps of the source that are not converted, for the start banner."""
    warnings: tuple[str, ...] = ()
    """Warnings about the source, one line each."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Reason why a column of the source cannot be converted, by column name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawEpisode:
    """The requested columns of one episode of T steps."""

    number: int
    """Index of the episode in the source, from 0."""
    where: str
    """File and position of the episode, for error messages."""
    columns: Mapping[str, np.ndarray]
    """Arrays [T, ...] by column name: numbers, and images as uint8 [T, H, W, 3]."""
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Texts [T] by column name."""
    instruction: str | None = None
    """Instruction of the episode, if the source stores the instruction outside its columns."""
    last_has_action: bool = True
    """False if the last step has only an observation; its action is a placeholder."""


class Source(Protocol):
    """Interface of a data set to convert, which yields its episodes in order."""

    description: Description
    """Format, size, columns and conventions of the data set."""

    def episodes(self, first: int, columns: Sequence[str]) -> Iterator[RawEpisode]:
        """Yield the episodes from number `first` on, in order; only one episode is in memory.

        Raises:
            EmbodyError: a file is damaged; the message names file and episode.
        """
        ...
