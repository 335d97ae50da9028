"""Whole training steps of PPO per CPU second on cheap environments: ours against Stable-Baselines3 in the same run.

    pip install stable-baselines3; python benchmarks/environments.py --json environments.json

Same environments, batch, mini-batches, epochs and networks, inline against DummyVecEnv, one thread each. Batched
CartPole (numpy, as arrays) is held against a plain loop of numpy and torch, which does nothing but what PPO must.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}

import numpy as np

from embodyrl.envs.factory import SimFactory
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import EnvSettings, RewardSettings
from embodyrl.envs.simulators import ArraySimulators, SimSteps
from embodyrl.types import ActionKind, ActionSpace, EnvSpec

CASES = {"CartPole-v1": (8, 256, 64, 10), "HalfCheetah-v5": (8, 256, 64, 10), "batched": (1024, 32, 4096, 4)}
"""Slots, steps of each, samples of a mini-batch, epochs."""


class CartPoles:
    """Gymnasium's CartPole-v1 for n slots as arrays; state [n, 4]."""

    def __init__(self, count: int) -> None:
        self.state = np.zeros((count, 4))

    def begin(self, slots: np.ndarray, rng: np.random.Generator) -> None:
        self.state[slots] = rng.uniform(-0.05, 0.05, (len(slots), 4))

    def step(self, slots: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Push; returns which poles fell [n]."""
        x, v, angle, spin = self.state[slots].T
        force, cos, sin = np.where(right, 10.0, -10.0), np.cos(angle), np.sin(angle)
        part = (force + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * part) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        moved = x + 0.02 * v, v + 0.02 * (part - 0.05 * turn * cos / 1.1), angle + 0.02 * spin, spin + 0.02 * turn
        self.state[slots] = np.stack(moved, 1)
        return (np.abs(moved[0]) > 2.4) | (np.abs(moved[2]) > 12 * 2 * math.pi / 360)


class Sims(ArraySimulators):
    def __init__(self, spec: EnvSpec, count: int) -> None:
        super().__init__(spec)
        self.poles = CartPoles(count)

    def begin(self, slots: np.ndarray, reset_ids: np.ndarray, seeds: np.ndarray) -> None:
        self.poles.begin(slots, np.random.default_rng(reset_ids))

    def advance(self, slots: np.ndarray, actions: np.ndarray) -> SimSteps:
        fell, no = self.poles.step(slots, actions[:, 0] > 0.5), np.zeros(len(slots), np.bool_)
        return SimSteps(reward=np.ones(len(slots), np.float32), terminated=fell, success=no, truncated=no)

    def observe(self, slots: np.ndarray, images: np.ndarray, state: np.ndarray) -> None:
        state[:] = self.poles.state[slots]


class BatchedSettings(EnvSettings, RewardSettings):
    """Nothing of its own."""


class BatchedFactory(SimFactory[BatchedSettings]):
    settings = BatchedSettings

    def describe(self, cfg: BatchedSettings, context: EnvContext) -> EnvSpec:
        space = ActionSpace(kind=ActionKind.discrete, sizes=(2,))
        many = {"tasks": ("",), "states_per_task": (10**6,), "reports_success": False, "lockstep": True}
        return EnvSpec(name="poles", action_dim=1, state_dim=4, action_space=space, on_gpu=False, **many)  # type: ignore[arg-type]

    def simulators(self, cfg: BatchedSettings, context: EnvContext) -> Sims:
        return Sims(self.describe(cfg, context), context.num_slots)


BATCHED = BatchedFactory()


def ours(case: str, steps: int) -> float:
    """Environment steps per CPU second of whole training steps; the first, which warms up, does not count."""
    from embodyrl.commands.train import train
    from embodyrl.plan.config import load_config

    slots, each, batch, epochs = CASES[case]
    env = ("env.env_type=environments:BATCHED", "env.use_rel_reward=false", "env.train.state_ids=[0,89999]")
    begun: list[float] = []

    def look(*_: Any) -> bool:
        begun.append(time.process_time())
        return False

    with tempfile.TemporaryDirectory() as folder:
        words = [
            "env=gym", *(env if case == "batched" else (f"env.id={case}",)), "model=mlp", "algorithm=ppo",
            "launcher=inline", f"env.train.total_num_envs={slots}", f"env.train.max_steps_per_rollout_epoch={each}",
            "env.train.max_episode_steps=500", "env.train.use_fixed_reset_state_ids=false",
            f"actor.global_batch_size={batch}", f"actor.micro_batch_size={batch}", f"algorithm.update_epoch={epochs}",
            f"runner.max_steps={steps + 1}", "runner.save_interval=-1", "runner.logger.backends=[jsonl]",
            "model.normalize_state=false", "algorithm.normalize_returns=false", f"runner.output_dir={folder}",
        ]  # fmt: skip
        train(load_config("train", words), on_step=look)
    return steps * slots * each / (begun[-1] - begun[0])


def stable_baselines(case: str, steps: int) -> float:
    import torch
    from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    slots, each, batch, epochs = CASES[case]
    vec = make_vec_env(case, n_envs=slots)
    model = PPO("MlpPolicy", vec, n_steps=each, batch_size=batch, n_epochs=epochs, device="cpu")
    model.learn(slots * each)
    began = time.process_time()
    model.learn(steps * slots * each)
    return steps * slots * each / (time.process_time() - began)


def plain_loop(case: str, steps: int) -> float:
    """PPO in one function: the same networks and batches, nothing kept, logged or checked."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    slots, each, batch, epochs = CASES[case]
    poles, rng, everyone = CartPoles(slots), np.random.default_rng(0), np.arange(slots)
    nets = [
        nn.Sequential(*(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n))) for n in (2, 1)
    ]
    policy, critic = nets
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], 3e-4)
    poles.begin(everyone, rng)
    began, age = 0.0, np.zeros(slots, np.int64)
    for step in range(steps + 1):
        if step == 1:
            began = time.process_time()
        shape = (each, slots)
        seen, action = torch.zeros((*shape, 4)), torch.zeros(shape, dtype=torch.long)
        logprob, value, over = (torch.zeros(shape) for _ in range(3))
        for t in range(each):
            seen[t] = torch.from_numpy(poles.state).float()
            with torch.no_grad():
                spread = torch.distributions.Categorical(logits=policy(seen[t]))
                action[t], value[t] = spread.sample(), critic(seen[t])[:, 0]
                logprob[t] = spread.log_prob(action[t])
            fell = poles.step(everyone, action[t].numpy() == 1)
            age += 1
            ended = fell | (age >= 500)
            over[t] = torch.from_numpy(ended).float()
            poles.begin(np.flatnonzero(ended), rng)
            age[ended] = 0
        with torch.no_grad():
            following = critic(torch.from_numpy(poles.state).float())[:, 0]
        advantage, carried = torch.zeros(shape), torch.zeros(slots)
        for t in reversed(range(each)):
            carried = 1.0 + 0.99 * following * (1 - over[t]) - value[t] + 0.99 * 0.95 * (1 - over[t]) * carried
            advantage[t], following = carried, value[t]
        flat = [one.flatten(0, 1) for one in (seen, action, logprob, advantage, advantage + value)]
        for _ in range(epochs):
            for rows in torch.randperm(slots * each).split(batch):
                x, a, old, gain, target = (one[rows] for one in flat)
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                spread = torch.distributions.Categorical(logits=policy(x))
                ratio = (spread.log_prob(a) - old).exp()
                surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                loss = 0.5 * (critic(x)[:, 0] - target).square().mean() - surrogate
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_([*policy.parameters(), *critic.parameters()], 0.5)
                optimizer.step()
    return steps * slots * each / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=4, help="training steps of each measurement")
    parser.add_argument("--pairs", type=int, default=3, help="measurements of each side, in turns")
    args = parser.parse_args()
    rows = []
    for case in args.cases:
        other: Callable[[str, int], float] = plain_loop if case == "batched" else stable_baselines
        pairs = [(ours(case, args.steps), other(case, args.steps)) for _ in range(args.pairs)]
        mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        rows.append(
            {
                "what": f"{case}, {CASES[case][0]} slots x {CASES[case][1]} steps, whole PPO step",
                "unit": "environment steps per CPU second",
                "ours": round(mine),
                "against": "plain numpy + torch" if case == "batched" else "Stable-Baselines3, DummyVecEnv",
                "theirs": round(theirs),
                "ratio": round(statistics.median(a / b for a, b in pairs), 3),
                "goal": 0.8 if case == "batched" else 1.2,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        machine = {"platform": platform.platform(), "python": platform.python_version(), "load": os.getloadavg()[0]}
        args.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
