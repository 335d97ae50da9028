"""Algorithms: advantage estimators and policy losses, each one file and one registry line. Needs no torch."""

from embodyrl.algorithms.checks import consumed_keys, problems, value_dim
from embodyrl.algorithms.metrics import merge_metrics
from embodyrl.algorithms.protocol import ADVANTAGES, LOSSES, build_algorithm

ADVANTAGES.add("grpo", "embodyrl.algorithms.grpo:GRPO")
ADVANTAGES.add("gae", "embodyrl.algorithms.gae:GAE")
LOSSES.add("ppo_clip", "embodyrl.algorithms.ppo_clip:PPO_CLIP")

__all__ = ["ADVANTAGES", "LOSSES", "build_algorithm", "consumed_keys", "merge_metrics", "problems", "value_dim"]
