"""Policies. Each lives in its own folder and is found through the registry."""

from embodyrl.policies.protocol import POLICIES, export_policy, fitting_models

POLICIES.add("causal_lm", "embodyrl.policies.causal_lm:CAUSAL_LM")
POLICIES.add("causal_lm_tiny", "embodyrl.policies.causal_lm:TINY")
POLICIES.add("cnn", "embodyrl.policies.actor_critic:CNN")
POLICIES.add("flow_small", "embodyrl.policies.flow.small:FACTORY")
POLICIES.add("mlp", "embodyrl.policies.actor_critic:MLP")
POLICIES.add("openvla_oft", "embodyrl.policies.openvla_oft:FACTORY")
POLICIES.add("openvla", "embodyrl.policies.openvla_oft:OPENVLA")
POLICIES.add("pi0", "embodyrl.policies.flow.vla:FACTORY")
POLICIES.add("pi05", "embodyrl.policies.flow.vla:PI05")
POLICIES.add("random", "embodyrl.policies.untrained:RANDOM")
POLICIES.add("remote", "embodyrl.policies.remote:FACTORY")
POLICIES.add("scripted", "embodyrl.policies.untrained:SCRIPTED")
POLICIES.add("smolvla", "embodyrl.policies.flow.vla:FACTORY")
POLICIES.add("vision_lm", "embodyrl.policies.causal_lm:VISION_LM")
POLICIES.add("vision_lm_tiny", "embodyrl.policies.causal_lm:VISION_TINY")

__all__ = ["POLICIES", "export_policy", "fitting_models"]
