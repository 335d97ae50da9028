"""Interfaces of text environments: rows and reward functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from embodyrl.extensions.text.conversation import TextRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished conversation to be rewarded."""

    prompt: str
    """The user's first message."""
    response: str
    """The last reply."""
    reference: str
    tokens: int
    """Length of the last reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Reward of one answer."""

    reward: float
    success: bool
    components: tuple[float, ...]
    """Components in the order of `Judge.components`."""
    problem: str | None = None
    """Error, if the reward is unknown."""


class Rows(Protocol):
    """Interface of rows of text tasks. Picklable; may read its source again in each process."""

    @property
    def name(self) -> str:
        """Name of the data."""
        ...

    @property
    def held_out(self) -> int:
        """Number of rows at the end that are held out for evaluation."""
        ...

    @property
    def repeated(self) -> int:
        """Number of held-out rows whose prompt is also in a training row."""
        ...

    @property
    def prompt_bytes(self) -> int:
        """UTF-8 bytes of the longest conversation of a row."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt of a row; 0: unknown."""
        ...

    @property
    def roles(self) -> tuple[tuple[str, ...], ...]:
        """All different sequences of roles in the rows."""
        ...

    @property
    def doubts(self) -> tuple[str, ...]:
        """Warnings about probably unintended content, one line each."""
        ...

    @property
    def pictures(self) -> int:
        """Maximum number of images in a row."""
        ...

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width that fit every image."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> TextRow: ...


class Judge(Protocol):
    """Interface of rewards of replies. Picklable; each env worker has its own instance."""

    components: tuple[str, ...]
    weights: tuple[float, ...]
    """Weight of each component in the reward."""

    def __call__(self, answers: Sequence[Answer]) -> list[Judgement]:
        """Return the rewards of a batch; a reward function that fails or times out gives 0 and is counted as a
        component.
        """
        ...

    def close(self) -> None:
        """Stop threads and processes; idempotent."""
        ...
