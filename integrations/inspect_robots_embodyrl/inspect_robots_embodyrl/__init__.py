"""Environments and policies of embodyrl in inspect-robots."""

from inspect_robots_embodyrl.embodiment import EmbodyrlEmbodiment
from inspect_robots_embodyrl.policy import EmbodyrlPolicy
from inspect_robots_embodyrl.task import episodes

__all__ = ["EmbodyrlEmbodiment", "EmbodyrlPolicy", "episodes"]
