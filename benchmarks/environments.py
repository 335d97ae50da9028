"""Compare PPO training steps per CPU second on cheap environments: embodyrl and Stable-Baselines3 in the same run.

    pip install stable-baselines3 "gymnasium[atari,other]"; python benchmarks/environments.py --json environments.json

Same environments, batch, mini-batches, epochs and networks, inline against DummyVecEnv, one thread each. Batched
CartPole (as arrays of numpy or of torch) is compared with a minimal loop of numpy and torch: log-probabilities without
`torch.distributions`, whose checks take a third of a step, inference mode, a fused optimizer, and the faster of two
hyperbolic tangents: torch's and the one of `model=mlp`, which uses numpy for large tensors.
"""

from __future__ import annotations

import argparse
import importlib
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
from embodyrl.envs.simulators import SimSteps, Simulators
from embodyrl.types import ActionKind, ActionSpec, EnvSpec, RewardSpec, SimulatorSpec

CASES = {
    "CartPole-v1": (8, 256, 64, 10),
    "HalfCheetah-v5": (8, 256, 64, 10),
    "Breakout": (8, 64, 256, 4),
    "batched": (1024, 32, 4096, 4),
    "batched-torch": (4096, 32, 16384, 4),
}
"""Number of environments, steps per environment, samples per mini-batch, and epochs of each environment."""
ARRAYS = {"batched": "numpy", "batched-torch": "torch"}
"""Array library of the simulator of each batched case."""


def breakout() -> Any:
    """Build Atari's Breakout with the usual wrappers: four grey frames [4, 84, 84], each of four steps."""
    import ale_py  # pyright: ignore[reportMissingImports]
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    gymnasium.register_envs(ale_py)
    return FrameStackObservation(AtariPreprocessing(gymnasium.make("ALE/Breakout-v5", frameskip=1)), 4)


class CartPoles:
    """Gymnasium's CartPole-v1 for n environments as arrays of numpy or of torch, the module `xp`; state [n, 4]."""

    def __init__(self, count: int, xp: Any) -> None:
        self.xp, self.state = xp, xp.zeros((count, 4))

    def begin(self, num_envs: np.ndarray, rng: np.random.Generator) -> None:
        self.state[num_envs] = self.xp.asarray(rng.uniform(-0.05, 0.05, (len(num_envs), 4)), dtype=self.state.dtype)

    def step(self, num_envs: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Push the carts; return a mask [n] of fallen poles."""
        xp = self.xp
        x, v, angle, spin = self.state[num_envs].T
        force, cos, sin = xp.where(xp.asarray(right), 10.0, -10.0), xp.cos(angle), xp.sin(angle)
        part = (force + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * part) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        moved = x + 0.02 * v, v + 0.02 * (part - 0.05 * turn * cos / 1.1), angle + 0.02 * spin, spin + 0.02 * turn
        self.state[num_envs] = xp.stack(moved, 1)
        return np.asarray((abs(moved[0]) > 2.4) | (abs(moved[2]) > 12 * 2 * math.pi / 360))


class Sims(Simulators):
    def __init__(self, spec: EnvSpec, count: int, xp: Any) -> None:
        super().__init__(spec)
        self.poles = CartPoles(count, xp)

    def reset(self, num_envs: np.ndarray, reset_ids: np.ndarray, seeds: np.ndarray) -> None:
        self.poles.begin(num_envs, np.random.default_rng(reset_ids))

    def step(self, num_envs: np.ndarray, actions: np.ndarray) -> SimSteps:
        fell, no = self.poles.step(num_envs, actions[:, 0] > 0.5), np.zeros(len(num_envs), np.bool_)
        return SimSteps(reward=np.ones(len(num_envs), np.float32), terminated=fell, success=no, truncated=no)

    def observe(self, num_envs: np.ndarray, images: np.ndarray, state: np.ndarray, rows: np.ndarray) -> None:
        state[rows] = self.poles.state[num_envs]


class BatchedSettings(EnvSettings, RewardSettings):
    """Config keys of the batched environment, without additional keys."""


class BatchedFactory(SimFactory[BatchedSettings]):
    settings = BatchedSettings

    def __init__(self, arrays: str) -> None:
        self.arrays = arrays

    def describe(self, cfg: BatchedSettings, context: EnvContext) -> EnvSpec:
        return EnvSpec(
            name="poles",
            action=ActionSpec(dim=1, kind=ActionKind.discrete, sizes=(2,)),
            tasks=("",),
            states_per_task=(10**6,),
            state_dim=4,
            reward=RewardSpec(reports_success=False),
            simulator=SimulatorSpec(lockstep=True, on_gpu=False),
        )

    def simulators(self, cfg: BatchedSettings, context: EnvContext) -> Sims:
        return Sims(self.describe(cfg, context), context.num_envs, importlib.import_module(self.arrays))


NUMPY, TORCH = (BatchedFactory(arrays) for arrays in ARRAYS.values())


def ours(case: str, steps: int) -> float:
    """Return env steps per CPU second of whole training steps; the first step is a warm-up and is excluded."""
    from embodyrl.commands.train import train
    from embodyrl.plan.config import load_config

    num_envs, each, batch, epochs = CASES[case]
    if case in ARRAYS:
        factory = f"env.env_type=environments:{ARRAYS[case].upper()}"
        env = ("model=mlp", factory, "env.use_rel_reward=false", "env.train.state_ids=[0,89999]")
    elif case == "Breakout":
        env = ("model=cnn", "env.id=environments:breakout")
    else:
        env = ("model=mlp", f"env.id={case}")
    if case != "Breakout":
        env += ("model.normalize_state=false",)
    begun: list[float] = []

    def look(*_: Any) -> bool:
        begun.append(time.process_time())
        return False

    with tempfile.TemporaryDirectory() as folder:
        words = [
            "env=gym", *env, "algorithm=ppo",
            "launcher=inline", f"env.train.total_num_envs={num_envs}", f"env.train.max_steps_per_rollout_epoch={each}",
            "env.train.max_episode_steps=500", "env.train.use_fixed_reset_state_ids=false",
            f"actor.global_batch_size={batch}", f"actor.micro_batch_size={batch}", f"algorithm.update_epoch={epochs}",
            f"runner.max_steps={steps + 1}", "runner.save_interval=-1", "runner.logger.backends=[jsonl]",
            "algorithm.normalize_returns=false", f"runner.output_dir={folder}",
        ]  # fmt: skip
        train(load_config("train", words), on_step=look)
    return steps * num_envs * each / (begun[-1] - begun[0])


def stable_baselines(case: str, steps: int) -> float:
    import torch
    from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    num_envs, each, batch, epochs = CASES[case]
    vec = make_vec_env(breakout if case == "Breakout" else case, n_envs=num_envs)
    policy, kwargs = ("CnnPolicy", _our_networks()) if case == "Breakout" else ("MlpPolicy", {})
    model = PPO(policy, vec, n_steps=each, batch_size=batch, n_epochs=epochs, device="cpu", policy_kwargs=kwargs)
    model.learn(num_envs * each)
    began = time.process_time()
    model.learn(steps * num_envs * each)
    return steps * num_envs * each / (time.process_time() - began)


def _our_networks() -> dict[str, Any]:
    """Return the `policy_kwargs` that match `model=cnn`; the defaults have more and larger kernels."""
    import torch
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor  # pyright: ignore[reportMissingImports]
    from torch import nn

    class Encoder(BaseFeaturesExtractor):
        def __init__(self, space: Any) -> None:
            super().__init__(space, features_dim=256)
            convolutions = [nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in ((4, 32), (32, 64), (64, 64))]
            parts = [part for one in convolutions for part in (one, nn.ReLU())]
            self.layers = nn.Sequential(*parts, nn.Flatten(), nn.Linear(64 * 11 * 11, 256), nn.ReLU())

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.layers(pixels)

    return {"features_extractor_class": Encoder, "net_arch": [64, 64], "activation_fn": nn.ReLU}


def plain_loop(case: str, steps: int) -> float:
    """Run PPO in one function with each hyperbolic tangent, and return the higher speed."""
    from torch import nn

    from embodyrl.policies.actor_critic.tanh import Tanh

    return max(_plain_loop(case, steps, activation) for activation in (nn.Tanh, Tanh))


def _plain_loop(case: str, steps: int, activation: Callable[[], Any]) -> float:
    """Run PPO in one function: the same networks, batches and loss, without storage, logging or checks."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    num_envs, each, batch, epochs = CASES[case]
    arrays = importlib.import_module(ARRAYS[case])
    poles, rng, everyone = CartPoles(num_envs, arrays), np.random.default_rng(0), np.arange(num_envs)
    nets = [
        nn.Sequential(*(nn.Linear(4, 64), activation(), nn.Linear(64, 64), activation(), nn.Linear(64, n)))
        for n in (2, 1)
    ]
    policy, critic = nets
    weights = [*policy.parameters(), *critic.parameters()]
    optimizer = torch.optim.AdamW(weights, 3e-4, eps=1e-5, weight_decay=0.0, fused=True)
    poles.begin(everyone, rng)
    began, age = 0.0, np.zeros(num_envs, np.int64)
    for step in range(steps + 1):
        if step == 1:
            began = time.process_time()
        shape = (each, num_envs)
        seen, action = torch.zeros((*shape, 4)), torch.zeros(shape, dtype=torch.long)
        logprob, value, over = (torch.zeros(shape) for _ in range(3))
        for t in range(each):
            seen[t] = torch.as_tensor(poles.state)
            with torch.inference_mode():
                log_probs = policy(seen[t]).log_softmax(-1)
                action[t] = (log_probs.exp().cumsum(-1) < torch.rand(num_envs, 1)).sum(-1).clamp_(max=1)
                logprob[t], value[t] = log_probs.gather(1, action[t, :, None])[:, 0], critic(seen[t])[:, 0]
            fell = poles.step(everyone, action[t].numpy() == 1)
            age += 1
            ended = fell | (age >= 500)
            over[t] = torch.from_numpy(ended).float()
            poles.begin(np.flatnonzero(ended), rng)
            age[ended] = 0
        with torch.inference_mode():
            following = critic(torch.as_tensor(poles.state).float())[:, 0]
        advantage, carried = torch.zeros(shape), torch.zeros(num_envs)
        for t in reversed(range(each)):
            carried = 1.0 + 0.99 * following * (1 - over[t]) - value[t] + 0.99 * 0.95 * (1 - over[t]) * carried
            advantage[t], following = carried, value[t]
        gains = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        flat = [one.flatten(0, 1) for one in (seen, action, logprob, gains, advantage + value)]
        for _ in range(epochs):
            for rows in torch.randperm(num_envs * each).split(batch):
                x, a, old, gain, target = (one[rows] for one in flat)
                ratio = (policy(x).log_softmax(-1).gather(1, a[:, None])[:, 0] - old).exp()
                surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                error = (critic(x)[:, 0] - target).square().mean()
                optimizer.zero_grad()
                (0.25 * error - surrogate).backward()
                nn.utils.clip_grad_norm_(weights, 0.5, foreach=True)
                optimizer.step()
    return steps * num_envs * each / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=4, help="training steps of each measurement")
    parser.add_argument("--pairs", type=int, default=3, help="number of measurements of each side, alternating")
    args = parser.parse_args()
    rows = []
    for case in args.cases:
        other: Callable[[str, int], float] = plain_loop if case in ARRAYS else stable_baselines
        pairs = [(ours(case, args.steps), other(case, args.steps)) for _ in range(args.pairs)]
        mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratios = [a / b for a, b in pairs]
        rows.append(
            {
                "what": f"{case}, {CASES[case][0]} environments x {CASES[case][1]} steps, whole PPO step",
                "unit": "environment steps per CPU second",
                "ours": round(mine),
                "against": "plain loop" if case in ARRAYS else "Stable-Baselines3, DummyVecEnv",
                "theirs": round(theirs),
                "ratio": round(statistics.median(ratios), 3),
                "spread": [round(min(ratios), 3), round(max(ratios), 3)],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        machine = {"platform": platform.platform(), "python": platform.python_version(), "load": os.getloadavg()[0]}
        args.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
