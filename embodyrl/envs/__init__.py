"""Environments. Each environment has its own folder and is registered by name."""

from embodyrl.envs.protocol import ENVS

ENVS.add("gym", "embodyrl.envs.gym.factory:FACTORY")

__all__ = ["ENVS"]
