"""Any Gymnasium environment. Importing this package does not import gymnasium."""

from embodyrl.envs.gym.factory import GymFactory

FACTORY = GymFactory()

__all__ = ["FACTORY"]
