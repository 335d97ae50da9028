"""Reward settings that determine the content of recorded episodes."""

from typing import Any

from embodyrl.config.settings import Settings, to_builtin
from embodyrl.envs.reward import StepRewardSettings


def get_custom_reward(reward: Settings | None) -> dict[str, Any]:
    """Return {"reward": settings} if `reward.path` replaces a simulator's reward, or an empty mapping."""
    return {"reward": to_builtin(reward)} if isinstance(reward, StepRewardSettings) and reward.path is not None else {}
