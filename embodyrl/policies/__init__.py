"""Policies. Each policy has its own folder and is registered by name."""

from embodyrl.policies.protocol import POLICIES, export_policy, suggest_models

__all__ = ["POLICIES", "export_policy", "suggest_models"]
