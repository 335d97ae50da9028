"""ManiSkill 3 tasks (SAPIEN); importing this package loads no simulator."""

from embodyrl.envs.maniskill.factory import ManiSkillFactory

FACTORY = ManiSkillFactory()

__all__ = ["FACTORY"]
