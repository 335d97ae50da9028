"""Environments. Each lives in its own folder and is found through the registry."""

from embodyrl.envs.protocol import ENVS

ENVS.add("gym", "embodyrl.envs.gym:FACTORY")
ENVS.add("libero", "embodyrl.envs.libero:FACTORY")
ENVS.add("maniskill", "embodyrl.envs.maniskill:FACTORY")
ENVS.add("text", "embodyrl.envs.text:FACTORY")
ENVS.add("tabletop", "embodyrl.envs.tabletop:FACTORY")

__all__ = ["ENVS"]
