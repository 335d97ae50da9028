"""An environment of your own. See docs/tutorials/own_env.md."""

import gymnasium as gym
import numpy as np


class Reach(gym.Env):
    """A point in the plane moves to a goal."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1.0, 1.0, (2, 2))
        return self._get_obs(), {}

    def step(self, action):
        before = np.linalg.norm(self.goal - self.position)
        self.position = np.clip(self.position + 0.2 * action, -1.0, 1.0)
        after = np.linalg.norm(self.goal - self.position)
        success = bool(after < 0.15)
        return self._get_obs(), float(before - after) + success, success, False, {"success": success}

    def _get_obs(self):
        return np.concatenate([self.position, self.goal]).astype(np.float32)
