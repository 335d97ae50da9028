"""Vector environments for `simulators.py`: env workers with an arena, and vector environments of other libraries."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import Record, build_record_layout
from embodyrl.channels.messages import EnvRequest, ResetRequest
from embodyrl.cluster.local import LocalLauncher
from embodyrl.cluster.protocol import WorkerDied
from embodyrl.envs import ENVS
from embodyrl.envs.protocol import EnvContext
from embodyrl.files import available_cores
from embodyrl.plan.build import split_envs
from embodyrl.plan.config import load_config
from embodyrl.policies import POLICIES
from embodyrl.types import EpisodeStart
from embodyrl.workers.env_worker import EnvWorkerInit
from embodyrl.workers.lifecycle import WorkerSpec

CORES = available_cores()


class Pixels(gymnasium.Env):
    """Environment with a 96x96 image and negligible cost."""

    observation_space = gymnasium.spaces.Box(0, 255, (96, 96, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self._picture = self.np_random.integers(0, 255, (96, 96, 3), np.uint8)
        return self._picture, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self._picture[0, 0] += 1
        return self._picture, 0.0, False, False, {}


class Busy(Pixels):
    """Environment with a state of four numbers and 2 ms of computation per step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        start = time.thread_time()
        while time.thread_time() - start < 0.002:
            pass
        return np.zeros(4, np.float32), 0.0, False, False, {}


CHEAP: dict[str, Callable[[], gymnasium.Env]] = {
    "CartPole-v1": lambda: gymnasium.make("CartPole-v1"),
    "pixels 96x96": Pixels,
    "2 ms of work": Busy,
}


class OurVector:
    """Env workers and the arena, with the requests of a rollout and actions from a table."""

    def __init__(self, name: str, count: int) -> None:
        classes = {"CartPole-v1": "CartPole-v1", "pixels 96x96": "vectors:Pixels", "2 ms of work": "vectors:Busy"}
        cfg = load_config("eval", ["env=gym", f"env.id={classes[name]}", "model=random", "model.num_action_chunks=1"])
        context = EnvContext(num_workers=min(CORES, count))
        spec = ENVS.get("gym").spec(cfg.env, context)
        policy = POLICIES.get("random").spec(cfg.model, spec, 0)
        self.count = count
        self._columns = Record
        self._arena = Arena.create(build_record_layout(spec, policy), 2 * count)
        self._folder = tempfile.TemporaryDirectory()
        self._launcher = LocalLauncher(Path(self._folder.name))
        self._envs = {worker.name: worker.env_indices for worker in split_envs(count, min(CORES, count))}
        for worker, num_envs in self._envs.items():
            init = EnvWorkerInit(
                env=cfg.env, context=replace(context, num_envs=len(num_envs)), video=cfg.video_cfg,
                arena=self._arena.handle,
            )  # fmt: skip
            spec = WorkerSpec(name=worker, entry="embodyrl.workers.env_worker:EnvWorker", init=init)
            self._launcher.start(spec, timeout_s=120.0)
        self._answers(len(self._envs))
        self._current = [self._arena.allocate() for _ in range(count)]
        self._next = [self._arena.allocate() for _ in range(count)]
        self._order({env_index: None for env_index in range(count)})

    def step(self) -> None:
        """Step all environments; ended environments are reset."""
        records = [record_ref.record for record_ref in self._current]
        self._arena[self._columns.action][records] = np.random.randint(0, 2, (self.count, 1, 1))
        self._order(dict(enumerate(self._current)))
        ends = (self._arena[name][records].any(1) for name in (self._columns.terminated, self._columns.truncated))
        done = np.logical_or(*ends)
        self._current, self._next = self._next, self._current
        if done.any():
            self._order(dict.fromkeys(np.flatnonzero(done).tolist()), reuse=True)

    def _order(self, work: dict[int, Any], reuse: bool = False) -> None:
        sent = 0
        targets = self._current if reuse or None in work.values() else self._next
        for worker, num_envs in self._envs.items():
            mine = {env_index: source for env_index, source in work.items() if env_index in num_envs}
            stepped = {env_index: source for env_index, source in mine.items() if source is not None}
            resets = tuple(
                ResetRequest(
                    env_index=env_index - num_envs.start,
                    start=EpisodeStart(reset_id=env_index, seed=0, max_episode_steps=10**6),
                    target=targets[env_index],
                )
                for env_index, source in mine.items()
                if source is None
            )
            if mine:
                request = EnvRequest(
                    stage=0,
                    num_envs=[env_index - num_envs.start for env_index in stepped],
                    sources=list(stepped.values()),
                    targets=[targets[env_index] for env_index in stepped],
                    resets=resets,
                )
                self._launcher.send(worker, request, timeout_s=60.0)
                sent += 1
        self._answers(sent)

    def _answers(self, count: int) -> None:
        while count:
            for event in self._launcher.wait(60.0):
                assert not isinstance(event.message, WorkerDied), event.message
                count -= 1

    def close(self) -> None:
        self._launcher.stop()
        self._arena.close()
        self._folder.cleanup()


class TheirVector:
    """Vector environment of Gymnasium or Stable-Baselines3, which reset automatically."""

    def __init__(self, env: Any, count: int) -> None:
        self.count, self._env = count, env
        env.reset()

    def step(self) -> None:
        self._env.step(np.random.randint(0, 2, self.count))

    def close(self) -> None:
        self._env.close()


def async_vector(name: str, count: int) -> TheirVector:
    return TheirVector(gymnasium.vector.AsyncVectorEnv([CHEAP[name]] * count, shared_memory=True), count)


def subproc_vector(name: str, count: int) -> TheirVector:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    return TheirVector(SubprocVecEnv([CHEAP[name]] * count, start_method="fork"), count)
