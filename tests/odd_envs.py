"""Unusual Gymnasium environments: valid ones, and ones that violate the interface."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

print("odd_envs was imported")  # noqa: T201 - as many modules do


class Plain(gymnasium.Env):
    """Environment whose actions change a number; ends at 5."""

    def __init__(self) -> None:
        self.observation_space: Any = spaces.Box(-99, 99, (2,), np.float32)
        self.action_space: Any = spaces.Box(-1, 1, (1,), np.float32)
        self.calls = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.start()
        self.steps = 0
        return self.look(), {}

    def step(self, action):
        self.calls += 1
        self.steps += 1
        self.place += float(np.asarray(action).reshape(-1)[0])
        return self.look(), self.place / 10, abs(self.place) > 5, False, {}

    def start(self) -> float:
        return float(self.np_random.uniform(-1, 1))

    def look(self) -> Any:
        return np.array([self.place, self.steps], np.float32)


class FixedStart(Plain):
    def start(self) -> float:
        return 0.0


class TupleObs(Plain):
    def __init__(self) -> None:
        super().__init__()
        inner = spaces.Dict({"kind": spaces.Discrete(3), "deep": spaces.Tuple([spaces.Box(-99, 99, (1,))])})
        self.observation_space = spaces.Tuple([spaces.Box(-99, 99, (2,), np.float64), inner])

    def look(self) -> Any:
        deep = (np.array([self.place], np.float32),)
        return np.array([self.place, self.steps]), {"kind": self.steps % 3, "deep": deep}


class ListObs(Plain):
    def look(self) -> Any:
        return [self.place, self.steps]


class Chatty(Plain):
    def step(self, action):
        print("step", self.calls)  # noqa: T201
        os.write(1, b"from below Python\n")
        return super().step(action)


class ArrayReward(Plain):
    def step(self, action):
        seen, reward, over, cut, info = super().step(action)
        return seen, np.float64(reward), np.bool_(over), np.bool_(cut), info


class Endless(Plain):
    """Environment with infinite bounds and without an end."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)

    def step(self, action):
        seen, reward, _, _, info = super().step(action)
        return seen, reward, False, False, info


class HalfOpen(Plain):
    """Environment whose actions have one bound, which it enforces."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(5.0, np.inf, (1,), np.float32)

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"{action} is below 5")
        return super().step(action - 6)


class OneStep(Plain):
    """A bandit: every episode has one step."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(3, start=2)

    def step(self, action):
        return self.look(), float(action == 3), True, False, {"is_success": action == 3}


class GreyStack(Plain):
    """Environment with four grey frames, most of them dark."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (4, 8, 8), np.uint8)

    def look(self) -> Any:
        frames = np.zeros((4, 8, 8), np.uint8)
        frames[-1, 0, int(self.place) % 8] = 200
        frames[0, 1, 0] = int(100 + 10 * self.place)
        return frames


class ArraysOfOne(Plain):
    def step(self, action):
        seen, reward, over, _, info = super().step(action)
        return seen, np.array([reward]), int(over), np.array(self.steps >= 20), info


class Switches(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.MultiBinary(3)

    def step(self, action):
        assert self.action_space.contains(action), action
        return super().step(action.sum() - 1.5)


class WholeNumbers(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(np.array([-1, 0]), np.array([3, 5]), dtype=np.int32)

    def step(self, action):
        assert self.action_space.contains(action), action
        return super().step(action.sum() - 3)


class OutsideItsSpace(Plain):
    def look(self) -> Any:
        return super().look() + 500


class FloatPicture(Plain):
    """Environment with channels-first float images in 0..1, as in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 1, (3, 16, 16), np.float32)

    def look(self) -> Any:
        picture = np.zeros((3, 16, 16), np.float32)
        picture[0, 0, int(self.place) % 16], picture[1, 0, 0] = 1, self.place % 1
        return picture


class OldReset(Plain):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class OldSeed(Plain):
    def reset(self):  # type: ignore[override]
        return super().reset()[0]


class OldStep(Plain):
    def step(self, action):  # type: ignore[override]
        seen, reward, over, _, info = super().step(action)
        return seen, reward, over, info


class NothingStepped(Plain):
    def step(self, action):
        super().step(action)


class NoReward(Plain):
    def step(self, action):
        return self.look(), None, False, False, {}


class NoInfo(Plain):
    def step(self, action):  # type: ignore[override]
        return (*super().step(action)[:4], None)


class NoInfoAtFirst(Plain):
    def reset(self, *, seed=None, options=None):  # type: ignore[override]
        return super().reset(seed=seed)[0], None


class TwoEnds(Plain):
    def step(self, action):
        seen, reward, over, cut, info = super().step(action)
        return seen, reward, np.array([over, over]), cut, info


class SaysNo(Plain):
    def step(self, action):
        return *super().step(action)[:4], {"success": "no"}


class SeesWords(Plain):
    def step(self, action):
        return np.array(["left", "right"]), *super().step(action)[1:]


class ShakesItsAction(Plain):
    """Environment that changes its action in place."""

    def step(self, action):
        action *= 0.5
        return super().step(action)


class OneArray(Plain):
    """Environment that observes into one read-only array."""

    def look(self) -> Any:
        if not hasattr(self, "seen"):
            self.seen = np.zeros(2, np.float32)
        self.seen.flags.writeable = True
        self.seen[:] = self.place, self.steps
        self.seen.flags.writeable = False
        return self.seen


class NoEnd(Plain):
    def step(self, action):
        seen, reward, over, _, info = super().step(action)
        return seen, reward, over, None, info


class OneWorldForAll(Plain):
    where = np.zeros(1)

    def reset(self, *, seed=None, options=None):
        _, info = super().reset(seed=seed)
        self.where[:] = self.place
        return self.look(), info

    def look(self) -> Any:
        return np.array([self.where[0], self.steps], np.float32)

    def step(self, action):
        self.where += np.asarray(action)
        return super().step(action)


class ResetsOnce(Plain):
    def reset(self, *, seed=None, options=None):
        if hasattr(self, "place"):
            raise RuntimeError("already running")
        return super().reset(seed=seed)


class Words(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict({"n": spaces.Box(-99, 99, (2,)), "say": spaces.Text(20)})

    def look(self) -> Any:
        return {"n": super().look(), "say": "go"}


class NanAtSomeStarts(Plain):
    def start(self) -> float:
        return float("nan") if self.np_random_seed else 0.0


class NanLater(Plain):
    def look(self) -> Any:
        return np.array([np.nan if self.calls > 150 else self.place, self.steps], np.float32)


class RaisesLater(Plain):
    def step(self, action):
        if self.calls > 300:
            raise RuntimeError("the arm fell off")
        return super().step(action)


class CrashesLater(Plain):
    def step(self, action):
        return super().step(action) if self.calls < 300 else ctypes.string_at(0)


class ExitsLater(Plain):
    def step(self, action):
        return super().step(action) if self.calls < 300 else os._exit(7)


class SleepsLater(Plain):
    def step(self, action):
        return super().step(action) if self.calls < 300 else time.sleep(3600)


class LocksLater(Plain):
    """Environment that deadlocks in C code while it holds the interpreter lock."""

    def step(self, action):
        if self.calls >= 300:
            threads, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
            while True:
                threads.pthread_mutex_lock(mutex)
        return super().step(action)


class WrongShape(Plain):
    def look(self) -> Any:
        return np.zeros(3, np.float32)


class NoSpaces(Plain):
    def __init__(self) -> None:
        self.calls = 0


class Crossed(gymnasium.vector.VectorEnv):
    """Vector environment that can only be reset as a whole."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-9, 9, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        self.place = np.random.default_rng(seed).uniform(-1, 1, (self.num_envs, 1)).astype(np.float32)
        return self.place.copy(), {}

    def step(self, actions):
        never = np.zeros(self.num_envs, bool)
        self.place += 0.1
        return self.place.copy(), never.astype(np.float64), never, never, {}


class NotSeeded(Plain):
    def start(self) -> float:
        return float(np.random.default_rng().uniform(-1, 1))


class FailsToBuild(Plain):
    def __init__(self) -> None:
        raise AttributeError("no licence")


class RendersNothing(Plain):
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> Any:
        return None


class RendersChannelsFirst(RendersNothing):
    def render(self) -> Any:
        return np.zeros((3, 4, 6), np.uint8)


class NoEnv:
    """Object with the methods of an environment but without its class."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)


class Agents(NoEnv):
    """Object with the interface of a PettingZoo environment."""

    possible_agents = ("one", "other")


def forgets_to_return() -> None:
    Plain()


def leaves_env_out(env: gymnasium.Env) -> None:
    """Wrapper function that returns None."""
