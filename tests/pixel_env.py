"""A pixel task for tests: move two joints to the position of a bright dot."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces


class Blind(gymnasium.Wrapper):
    """Environment without rendering."""

    render_mode = None


def blind(env: gymnasium.Env) -> gymnasium.Env:
    """Remove the image."""
    return Blind(env)


class PixelEnv(gymnasium.Env):
    """Image [size, size, 3]; actions MultiDiscrete [2, 2]: the half of the image, vertical and horizontal."""

    def __init__(self, size: int = 8) -> None:
        self.observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = spaces.MultiDiscrete([2, 2])
        self._size = size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action):
        right = bool((np.asarray(action) == self._dot // (self._size // 2)).all())
        return self._draw(), float(right), False, False, {"success": right}

    def _draw(self):
        self._dot = self.np_random.integers(0, self._size // 2 * 2, 2)
        picture = np.zeros((self._size, self._size, 3), np.uint8)
        picture[tuple(self._dot)] = 255
        return picture


class PointingEnv(PixelEnv):
    """The same image with two real-valued actions, rewarded by their distance to the dot."""

    def __init__(self, size: int = 8) -> None:
        super().__init__(size)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def step(self, action):
        distance = float(np.abs(np.asarray(action) - (2 * self._dot / self._size - 1)).sum())
        return self._draw(), -distance, False, False, {}


class Dial(PixelEnv):
    """The same image with one real-valued action."""

    def __init__(self, size: int = 8) -> None:
        super().__init__(size)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)


class DiesOnce(gymnasium.Wrapper):
    """Environment that kills its env worker once at the given step; a marker file records the kill.

    The first instance in a process only describes the environment.
    """

    made = 0

    def __init__(self, env: gymnasium.Env, at: int, marker: str) -> None:
        super().__init__(env)
        self._left, self._marker = at, Path(marker)
        self._acts = DiesOnce.made > 0 and multiprocessing.parent_process() is not None
        DiesOnce.made += 1

    def step(self, action):
        self._left -= 1
        if not self._left and not self._marker.exists() and self._acts:
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)
