"""Rewards of text answers: small functions in a registry, and the judge that runs them with a time limit."""

from embodyrl.rewards.judge import RewardJudge, build_judge, problems
from embodyrl.rewards.services import REWARDS

for _name in ("exact", "overlap", "math", "choice", "format", "countdown", "code"):
    REWARDS.add(_name, f"embodyrl.rewards.functions:{_name if _name != 'format' else 'tagged'}")

__all__ = ["REWARDS", "RewardJudge", "build_judge", "problems"]
