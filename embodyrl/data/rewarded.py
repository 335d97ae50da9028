"""Reward settings that determine the content of recorded episodes."""

from typing import Any

from embodyrl.config.settings import plain
from embodyrl.envs.reward import StepRewardSettings


def changed_reward(cfg: Any) -> dict[str, Any]:
    """Return the settings of the section `reward` if `reward.path` is set, or an empty mapping."""
    reward = getattr(cfg, "reward", None)
    return {"reward": plain(reward)} if isinstance(reward, StepRewardSettings) and reward.path is not None else {}
