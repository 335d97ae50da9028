"""Gymnasium environments with the spaces of public environments."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from odd_envs import Plain


class MissionSpace(spaces.Space):
    """Text space as in MiniGrid."""

    def __init__(self) -> None:
        super().__init__(dtype=str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MissionSpace)

    def __hash__(self) -> int:
        return 1

    def sample(self, mask=None, probability=None) -> str:
        return "go to 0"

    def contains(self, x) -> bool:
        return isinstance(x, str)


class Missions(Plain):
    """Environment with a different instruction in each episode, nested in the observation."""

    def __init__(self) -> None:
        super().__init__()
        inner = spaces.Tuple([spaces.Dict({"mission": MissionSpace()})])
        self.observation_space = spaces.Dict({"n": spaces.Box(-99, 99, (2,)), "deep": inner})

    def look(self) -> Any:
        return {"n": super().look(), "deep": ({"mission": f"go to {self.np_random_seed}"},)}


class InfoWords(Plain):
    def reset(self, *, seed=None, options=None):
        seen, _ = super().reset(seed=seed)
        return seen, {"goal": {"say": f"go to {seed}"}}


class RedPicture(Plain):
    """Environment with channels-first images, which look like three grey cameras."""

    shape, axis = (3, 24, 24), 0

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, self.shape, np.uint8)

    def look(self) -> Any:
        picture = np.zeros(self.shape, np.uint8)
        np.moveaxis(picture, self.axis, 0)[0] = int(150 + 7 * self.place) % 256
        if 4 in self.shape:
            np.moveaxis(picture, self.axis, 0)[3] = 255
        return picture


class Rgba(RedPicture):
    shape, axis = (24, 24, 4), 2


class RgbaFirst(RedPicture):
    shape, axis = (4, 24, 24), 0


class TrueStack(RedPicture):
    """Environment with three grey frames, newest last."""

    def reset(self, *, seed=None, options=None):
        self.frames = np.zeros(self.shape, np.uint8)
        return super().reset(seed=seed)

    def look(self) -> Any:
        self.frames = np.roll(self.frames, -1, axis=0)
        self.frames[-1] = int(100 + 7 * self.place) % 256
        return self.frames


class ColorStack(TrueStack):
    """Environment with two channels-first RGB frames, newest last."""

    shape = (6, 24, 24)

    def look(self) -> Any:
        self.frames = np.roll(self.frames, -3, axis=0)
        self.frames[-3:] = np.array([int(100 + 7 * self.place) % 256, 3, 9], np.uint8)[:, None, None]
        return self.frames


class BytesWords(Plain):
    """Environment whose text is a byte array."""

    words: Any = b"go"

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict({"n": spaces.Box(-99, 99, (2,)), "mission": MissionSpace()})

    def look(self) -> Any:
        return {"n": super().look(), "mission": self.words}


class EmptyWords(BytesWords):
    words = ""


class InfoTask(Plain):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"task": "open the door", "map": "kitchen"}


class LacksMember(BytesWords):
    def look(self) -> Any:
        return {"mission": "go"}


class ManyCategories(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Discrete(2**40)

    def look(self) -> Any:
        return 7


class PartialSuccess(Plain):
    """Environment that reports a fraction of the goal."""

    def step(self, action):
        return *super().step(action)[:4], {"success": 0.3}


class Won(Plain):
    def step(self, action):
        return *super().step(action)[:4], {"won": True}


class Reached(Plain):
    def step(self, action):
        return *super().step(action)[:4], {"step_limit_reached": False, "reached": True}


def partial_batch(num_envs):
    return gymnasium.vector.SyncVectorEnv([PartialSuccess] * num_envs)


class LateSuccess(Plain):
    """Environment that reports success only at the end."""

    def step(self, action):
        seen, reward, over, _, _ = super().step(action)
        return seen, reward, over, self.steps >= 8, {"succeed": np.array(False)} if self.steps >= 8 else {}


class SimilarKey(Plain):
    def step(self, action):
        return *super().step(action)[:4], {"metrics": {"task_success": True}}


class AlmostTheSame(Plain):
    """Environment whose resets differ by less than float32 resolves."""

    def start(self) -> float:
        return super().start() + float(np.random.default_rng().uniform(0, 1e-6))


class Stamp(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 2**40, (2,), np.int64)

    def look(self) -> Any:
        return np.array([2**30 + self.steps, int(100 * abs(self.place))], np.int64)


class IgnoresSeed(Plain):
    """Environment whose initial state depends on the number of resets instead of the seed."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets = getattr(self, "resets", 0) + 1
        self.place = self.resets / 10
        return self.look(), {}


class MaskInInfo(Plain):
    def reset(self, *, seed=None, options=None):
        seen, info = super().reset(seed=seed)
        return seen, info | {"legal_actions": [0]}


class MaskInObservation(Plain):
    def __init__(self) -> None:
        super().__init__()
        place = spaces.Box(-99, 99, (2,))
        self.observation_space = spaces.Dict({"n": place, "action_mask": spaces.MultiBinary(2)})

    def look(self) -> Any:
        return {"n": super().look(), "action_mask": np.array([1, 0], np.int8)}


class FarAway(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def look(self) -> Any:
        return np.array([1e8 + self.place, self.steps])


class Depth(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 65535, (40, 48, 1), np.uint16)

    def look(self) -> Any:
        return np.full((40, 48, 1), 1000 + int(100 * self.place), np.uint16)


class SeesNothing(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict({"a": spaces.Box(-1, 1, (0,))})

    def look(self) -> Any:
        return {"a": np.zeros(0, np.float32)}


class TwoRewards(Plain):
    def step(self, action):
        seen, reward, *rest = super().step(action)
        return seen, np.array([reward, 1.0]), *rest


class OldClass:
    """Environment with the old interface and without a base class."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def reset(self):
        return np.zeros(2)

    def step(self, action):
        return np.zeros(2), 0.0, False, {}


class NanForOneStep(Plain):
    def look(self) -> Any:
        return np.array([np.nan if self.steps == 9 else self.place, self.steps], np.float32)

    def step(self, action):
        seen, reward, _, _, info = super().step(action)
        return seen, reward, False, self.steps >= 11, info


class NanPicture(NanForOneStep):
    """Environment with NaN in a float image; converted to integers, NaN would be black."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (16, 16, 3), np.uint8)

    def look(self) -> Any:
        return np.full((16, 16, 3), np.nan if self.steps == 9 else 100 + 10 * self.place)


class LeavesThreads(Plain):
    """Environment whose `close` leaves threads and a process."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=threading.Event().wait, name="motor").start()
        self.motor = subprocess.Popen(["sleep", "1000"])


class OnlyThreads(Plain):
    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=threading.Event().wait, name="motor").start()


class TwoCameras(Plain):
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> Any:
        return np.stack([np.full((8, 10, 3), grey, np.uint8) for grey in (10, 200)])


class RendersAtOnce(Plain):
    """Environment whose constructor builds a renderer, without a render mode."""

    def __init__(self) -> None:
        super().__init__()
        import mujoco

        mujoco.Renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), 8, 8).close()


def make_env(n_envs=1, use_async_envs=False, cfg=None):
    """Create environments with LeRobot's EnvHub contract."""
    return gymnasium.vector.SyncVectorEnv([Missions] * n_envs)


def make_suites(n_envs, use_async_envs):
    """Create several suites of environments."""
    return {name: {0: gymnasium.vector.SyncVectorEnv([kind] * n_envs)} for name, kind in SUITES.items()}


def make_no_suites(n_envs, use_async_envs):
    """Create no environment."""
    return {}


def make_single(n_envs, use_async_envs):
    """Create a single environment."""
    return TwoCameras()


SUITES = {"near": Plain, "far": FarAway}

gymnasium.register("OnlyThreads-v0", OnlyThreads, max_episode_steps=9)
