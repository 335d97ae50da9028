"""Environments: their interface and registry, and one folder for each environment."""

from embodyrl.envs.protocol import ENVS

ENVS.add("gym", "embodyrl.envs.gym.factory:FACTORY")

__all__ = ["ENVS"]
