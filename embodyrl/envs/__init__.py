"""Environments. Each has its own folder and is found through the registry."""

from embodyrl.envs.protocol import ENVS

ENVS.add("gym", "embodyrl.envs.gym.factory:FACTORY")

__all__ = ["ENVS"]
