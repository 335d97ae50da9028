"""Environments. Each lives in its own folder and is found through the registry."""

from embodyrl.envs.protocol import ENVS

ENVS.add("gym", "embodyrl.envs.gym.factory:FACTORY")
ENVS.add("libero", "embodyrl.envs.libero.factory:FACTORY")
ENVS.add("maniskill", "embodyrl.envs.maniskill.factory:FACTORY")
ENVS.add("metaworld", "embodyrl.envs.metaworld.factory:FACTORY")
ENVS.add("text", "embodyrl.envs.text.factory:FACTORY")
ENVS.add("text_game", "embodyrl.envs.text.game:FACTORY")
ENVS.add("tabletop", "embodyrl.envs.tabletop.factory:FACTORY")

__all__ = ["ENVS"]
