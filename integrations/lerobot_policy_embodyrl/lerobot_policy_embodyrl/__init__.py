"""Policies of embodyrl in LeRobot. Importing this package registers `--policy.type=embodyrl`."""

# LeRobot 0.4 finds policies by the name of their package, but not environments.
import lerobot_env_embodyrl  # noqa: F401

from lerobot_policy_embodyrl.configuration_embodyrl import EmbodyrlConfig

__all__ = ["EmbodyrlConfig"]
