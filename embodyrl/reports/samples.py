"""Selection and printing of example conversations from evaluations of a language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from embodyrl.monitor.history import EpisodeRow

_MAX_TURN_LENGTH = 160
"""Maximum number of characters printed per turn."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Conversation of the last evaluation and, if present, the same episode of the first evaluation."""

    before: EpisodeRow | None
    after: EpisodeRow

    @property
    def prompt_turns(self) -> tuple[tuple[str, str], ...]:
        """Role and text of the turns before the last reply."""
        return self.after.conversation[:-1]


def pick_samples(before: Sequence[EpisodeRow], after: Sequence[EpisodeRow], count: int) -> list[Sample]:
    """Select up to `count` conversations, alternating between newly solved, failed and other episodes."""
    earlier = {(row.episode, row.reset_id, row.seed): row for row in before if row.conversation}
    kinds: list[list[Sample]] = [[], [], []]
    for row in after:
        if row.conversation:
            sample = Sample(earlier.get((row.episode, row.reset_id, row.seed)), row)
            is_newly_solved = bool(row.success_once) and not (sample.before and sample.before.success_once)
            kinds[0 if is_newly_solved else 1 if not row.success_once else 2].append(sample)
    return [sample for sample in chain.from_iterable(zip_longest(*kinds)) if sample is not None][:count]


def format_samples(samples: Sequence[Sample]) -> Iterator[str]:
    """Yield conversations as lines of text for a terminal."""
    for sample in samples:
        for role, text in sample.prompt_turns:
            yield f"  {role:<10} {_to_one_line(text)}"
        for name, row in (("before", sample.before), ("reply", sample.after)):
            if row is not None:
                reply = _to_one_line(row.conversation[-1][1])
                yield f"  {name:<10} {reply}   [{row.outcome}, return {row.episode_return:.3g}]"
                yield from (f"  {'':<10} {line}" for line in row.warnings)


def _to_one_line(text: str) -> str:
    line = "".join(c if c.isprintable() else "\\n" if c == "\n" else "?" for c in text)
    return line if len(line) <= _MAX_TURN_LENGTH else f"{line[: _MAX_TURN_LENGTH - 3]}..."
