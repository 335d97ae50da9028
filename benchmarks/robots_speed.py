"""Steps per CPU second of robot presets and of functional environments, against a bare loop in the same process.

python benchmarks/robots_speed.py pusht fetch_reach gymnax:CartPole-v1
python benchmarks/robots_speed.py robosuite_lift --python ~/robosuite/bin/python
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from embodyrl.envs.functional.factory import FACTORY as FUNCTIONAL
from embodyrl.envs.functional.settings import FunctionalSettings
from embodyrl.envs.gym.create import create
from embodyrl.envs.mujoco_rendering import select_headless_backend
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.robots.factory import FACTORY as ROBOTS
from embodyrl.envs.robots.settings import RobotSettings
from embodyrl.types import EpisodeStart

ROUNDS, SECONDS, SLOTS = 5, 1.0, 256
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """Return the CPU time of this process and of its running children."""
    used = time.process_time()
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            used += (int(fields[11]) + int(fields[12])) / TICKS
    return used


def steps_per_s(step: Callable[[], int]) -> float:
    """Return executed env steps per CPU second."""
    done, begun, ends = 0, cpu_s(), time.perf_counter() + SECONDS
    while time.perf_counter() < ends:
        done += step()
    return done / max(cpu_s() - begun, 1e-6)


def ours(factory: Any, cfg: Any, num_envs: int) -> Callable[[], int]:
    env = factory.make(cfg, EnvContext(num_envs=num_envs, renders_images=False))
    spec, every = env.spec, list(range(num_envs))
    images = np.zeros((num_envs, len(spec.cameras.names), *spec.cameras.size, 3), np.uint8)
    state, episodes = np.zeros((num_envs, spec.state_dim), np.float32), [0]
    actions = actions_of(spec.action, num_envs)

    def begin(chosen: list[int]) -> None:
        episodes[0] += 1
        start = EpisodeStart(reset_id=episodes[0], seed=0, max_episode_steps=spec.max_episode_steps)
        env.reset(chosen, [start] * len(chosen))

    def step() -> int:
        result = env.step_chunk(every, actions())
        if over := np.flatnonzero(result.done).tolist():
            begin(over)
        env.observe(every, images, state)
        return num_envs

    begin(every)
    return step


def actions_of(action: Any, num_envs: int) -> Callable[[], np.ndarray]:
    rng, (low, high) = np.random.default_rng(0), action.bounds
    table = rng.uniform(low, high, (64, num_envs, 1, action.dim)).astype(np.float32)
    table = table if not action.sizes else rng.integers(0, action.sizes, table.shape).astype(np.float32)
    return lambda: table[rng.integers(64)]


def bare(cfg: RobotSettings) -> Callable[[], int]:
    env = create(cfg.gym, cfg.gym.kwargs)
    rng, space = np.random.default_rng(0), env.action_space
    table = [rng.uniform(space.low, space.high).astype(space.dtype) for _ in range(64)]
    episodes = [0]
    env.reset(seed=0)

    def step() -> int:
        _, _, ended, truncated, _ = env.step(table[rng.integers(64)])
        if ended or truncated:
            episodes[0] += 1
            env.reset(seed=episodes[0])
        return 1

    return step


def bare_batch(cfg: FunctionalSettings) -> Callable[[], int]:
    import jax  # pyright: ignore[reportMissingImports]

    from embodyrl.envs.functional.functions import load

    functions = load(cfg)
    keys = jax.random.split(jax.random.PRNGKey(0), SLOTS)
    now = [jax.jit(jax.vmap(functions.reset))(keys)]
    act = actions_of(functions.action, SLOTS)
    chosen = (lambda a: a[:, 0, 0].astype(np.int32)) if functions.action.sizes else (lambda a: a[:, 0])
    advance = jax.jit(jax.vmap(functions.step))

    def step() -> int:
        now[0] = advance(now[0].carry, chosen(act()), keys)
        for part in (now[0].obs, now[0].reward, now[0].terminated):
            np.asarray(part)
        return SLOTS

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--python", default=None)
    args = parser.parse_args()
    select_headless_backend()
    print("| environment | steps per CPU second | bare loop | ratio |\n|---|---|---|---|")
    for name in args.names:
        if ":" in name:
            cfg: Any = FunctionalSettings(env_type="functional", id=name, use_rel_reward=False)
            pair = ours(FUNCTIONAL, cfg, SLOTS), bare_batch(cfg)
        else:
            python = args.python if name.startswith("robosuite") else None
            cfg = RobotSettings(env_type="robots", robot=name, python=python, use_rel_reward=False)
            pair = ours(ROBOTS, cfg, 1), bare(cfg)
        for step in pair:
            steps_per_s(step)
        rows = [[steps_per_s(step) for step in pair] for _ in range(ROUNDS)]
        mine, theirs = (median(column) for column in zip(*rows, strict=True))
        print(f"| {name} | {mine:.0f} | {theirs:.0f} | {median(a / b for a, b in rows):.2f} |", flush=True)


if __name__ == "__main__":
    main()
