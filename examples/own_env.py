"""An environment of your own. See docs/tutorials/own_env.md."""

import gymnasium as gym
import numpy as np


class Reach(gym.Env):
    """A point in the plane walks to a goal."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.goal = self.np_random.uniform(-1.0, 1.0, (2, 2))
        return self._look(), {}

    def step(self, action):
        before = np.linalg.norm(self.goal - self.place)
        self.place = np.clip(self.place + 0.2 * action, -1.0, 1.0)
        after = np.linalg.norm(self.goal - self.place)
        success = bool(after < 0.15)
        return self._look(), float(before - after) + success, success, False, {"success": success}

    def _look(self):
        return np.concatenate([self.place, self.goal]).astype(np.float32)
