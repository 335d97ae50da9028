"""Turns of text conversations for evaluations, and the accuracy of majority votes."""

from collections.abc import Sequence

from embodyrl.monitor.history import EpisodeRow
from embodyrl.text.answers import final_answer
from embodyrl.text.messages import split_messages, spoken


def turns_of(instruction: str) -> tuple[tuple[str, str], ...]:
    """Return the (role, text) pairs of a conversation's turns; empty for any other instruction."""
    said = split_messages(instruction)
    return tuple((turn.role, spoken(turn.content)) for turn in said) if len(said) > 1 else ()


def majority(episodes: Sequence[EpisodeRow]) -> float | None:
    """Return the majority-vote accuracy (self-consistency, arXiv 2203.11171); ties go to the earliest answer."""
    given: dict[tuple[int, int], dict[str, list[bool]]] = {}
    for episode in sorted(episodes, key=lambda e: e.episode):
        if not episode.conversation or episode.conversation[-1][0] != "assistant":
            return None  # no text, or a game that ends with an observation
        answers = given.setdefault((episode.task_id, episode.reset_id), {})
        answers.setdefault(final_answer(episode.conversation[-1][1]), []).append(bool(episode.success_once))
    # Equal answers have equal rewards, except code with different text around it.
    return sum(max(votes, key=len)[0] for votes in (list(a.values()) for a in given.values())) / len(given)
