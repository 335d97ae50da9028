"""Keys of text rewards."""

from typing import Annotated

from pydantic import Field

from embodyrl.config.settings import Index, Path, Seconds, Settings, Weight


class JudgeSettings(Settings):
    """Reward functions of a reply."""

    needs = {"overlong_buffer": "overlong_penalty"}

    name: str | None = None
    """Reward of a text answer that also decides success (at least 1); docs/reference/text.md lists them."""
    path: Path | None = None
    """Custom reward: package.module:function of (prompt, response, reference) -> number or named numbers, the http
    address of a reward service, or the folder of a reward model.
    """
    weights: dict[str, float] = {}
    """Weight of each reward by name, 1 where none is given; names not chosen above are added."""
    overlong_buffer: Index = 0
    """Tokens below max_new_tokens in which a penalty grows from 0 to overlong_penalty; 0: none."""
    overlong_penalty: Weight = 1.0
    """Penalty of an answer that is cut off at max_new_tokens."""
    timeout_s: Seconds = 5.0
    """Longest time for one answer; then it earns 0 and is counted."""
    workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Reward processes per env worker."""
