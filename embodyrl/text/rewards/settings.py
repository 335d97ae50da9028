"""Config keys for text rewards."""

from typing import Annotated

from pydantic import Field

from embodyrl.config.settings import Index, Path, Seconds, Settings, Weight


class TextRewardSettings(Settings):
    """Config keys for the reward functions of text replies."""

    keys_by_condition = {"overlong_buffer": "overlong_penalty"}

    name: str | None = None
    """Name of a reward function (listed in docs/reference/text.md); a value of at least 1 is a success."""
    path: Path | None = None
    """Custom reward: package.module:function, the http address of a reward service, or the folder of a reward model.
    A function of (prompt, response, reference), or of a RewardStep for a simulator, returns a number or named numbers.
    """
    weights: dict[str, float] = {}
    """Weight of each reward function by name (default 1); functions other than reward.name are added to the reward."""
    overlong_buffer: Index = 0
    """Length in tokens of the range before max_new_tokens in which the penalty of a reply grows to overlong_penalty
    (DAPO). 0: no penalty."""
    overlong_penalty: Weight = 1.0
    """Penalty for a reply that is truncated at max_new_tokens."""
    timeout_s: Seconds = 5.0
    """Time limit per reply in seconds; after a timeout, the reward is 0 and train/reward_errors increases."""
    workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of reward processes per env worker."""
