"""Policies. Each policy has its own folder and is registered by name."""

from embodyrl.policies.protocol import POLICIES, export_policy, fitting_models

POLICIES.add("cnn", "embodyrl.policies.actor_critic:CNN")
POLICIES.add("mlp", "embodyrl.policies.actor_critic:MLP")

__all__ = ["POLICIES", "export_policy", "fitting_models"]
