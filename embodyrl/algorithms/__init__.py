"""Algorithms: advantage estimators and policy losses, each one file and one registry line. Needs no torch."""

from embodyrl.algorithms.aggregation import merge_metrics
from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.protocol import ADVANTAGES, LOSSES, algorithm_settings

for _name, _attr in {
    "grpo": "outcome:GRPO",
    "rloo": "outcome:RLOO",
    "opo": "outcome:OPO",
    "gpg": "outcome:GPG",
    "pass_at_k": "outcome:PASS_AT_K",
    "gdpo": "outcome:GDPO",
    "gigpo": "outcome:GIGPO",
    "gae": "stepwise:GAE",
    "remax": "stepwise:REMAX",
    "reinforce_pp": "stepwise:REINFORCE_PP",
    "reinforce_pp_baseline": "stepwise:REINFORCE_PP_BASELINE",
}.items():
    ADVANTAGES.add(_name, f"embodyrl.algorithms.{_attr}")
for _name in (
    *("ppo_clip", "gspo", "gmpo", "sapo", "cispo", "pg", "aipo", "aipo_ratio", "topr", "dro", "clip_cov", "kl_cov"),
):
    LOSSES.add(_name, f"embodyrl.algorithms.policy_losses:{_name.upper()}")

__all__ = ["ADVANTAGES", "LOSSES", "Algorithm", "algorithm_settings", "merge_metrics"]
