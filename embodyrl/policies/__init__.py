"""Policies. Each lives in its own folder and is found through the registry."""

from embodyrl.policies.protocol import POLICIES

POLICIES.add("openvla_oft", "embodyrl.policies.openvla_oft:FACTORY")

__all__ = ["POLICIES"]
