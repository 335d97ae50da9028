"""Environments: their interface and registry, and one folder for each environment."""

from embodyrl.envs.protocol import ENVS

__all__ = ["ENVS"]
