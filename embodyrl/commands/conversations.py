"""Turns of text conversations for evaluations, and the accuracy of majority votes."""

from collections.abc import Sequence

from embodyrl.monitor.history import EpisodeRow
from embodyrl.text.answers import final_answer
from embodyrl.text.messages import restore_image_placeholders, split_messages


def get_turns(instruction: str) -> tuple[tuple[str, str], ...]:
    """Return the (role, text) pairs of a conversation's turns; empty for any other instruction."""
    messages = split_messages(instruction)
    return (
        tuple((turn.role, restore_image_placeholders(turn.content)) for turn in messages) if len(messages) > 1 else ()
    )


def majority_accuracy(episodes: Sequence[EpisodeRow]) -> float | None:
    """Return the majority-vote accuracy (self-consistency, arXiv 2203.11171); ties go to the earliest answer."""
    answers_by_state: dict[tuple[int, int], dict[str, list[bool]]] = {}
    for episode in sorted(episodes, key=lambda row: row.episode):
        if not episode.conversation or episode.conversation[-1][0] != "assistant":
            return None  # no text, or a game that ends with an observation
        answers = answers_by_state.setdefault((episode.task_id, episode.reset_id), {})
        answers.setdefault(final_answer(episode.conversation[-1][1]), []).append(bool(episode.success_once))
    # Equal answers have equal rewards, except code with different text around it.
    return sum(
        max(votes, key=len)[0]
        for votes in (list(state_answers.values()) for state_answers in answers_by_state.values())
    ) / len(answers_by_state)
