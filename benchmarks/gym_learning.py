"""Compare final returns on Gymnasium tasks with rl-baselines3-zoo's settings: embodyrl and Stable-Baselines3.

    pip install stable-baselines3 "gymnasium[box2d,mujoco]" gymnasium-robotics minatar
    python benchmarks/gym_learning.py --json learning.json

Each run trains once for the same number of steps, then runs 100 greedy episodes from held-out initial states. One
thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}

EPISODES = 100
WIDE = {"activation_fn": "ReLU", "net_arch": [256, 256], "log_std_init": -2, "ortho_init": False}
OURS_WIDE = ("model.hidden_sizes=[256,256]", "model.activation=relu", "model.log_std_init=-2", "model.ortho_init=false")
REACHING = "gymnasium_robotics:FetchReach-v4"
REACH = {
    "normalize": True, "her": True, "learning_rate": 1e-3, "gamma": 0.95, "ent_coef": "auto_0.1",
    "policy_kwargs": {"net_arch": [64, 64]},
}  # fmt: skip
OURS_REACH = (
    "model.hidden_sizes=[64,64]", "model.normalize_state=true", "actor.optim.lr=1e-3", "actor.optim.value_lr=1e-3",
    "algorithm.gamma=0.95", "algorithm.alpha_init=0.1", "algorithm.learning_starts=100", "algorithm.hindsight_goals=4",
    "env.train.max_steps_per_rollout_epoch=50",
)  # fmt: skip
DEMONSTRATIONS = 20
"""Number of episodes of the scripted expert for RLPD."""
CASES: dict[str, tuple[str, str, int, dict[str, Any], tuple[str, ...]]] = {
    "pendulum-sac": (
        "Pendulum-v1", "sac", 5_000, {"learning_rate": 1e-3, "policy_kwargs": {"net_arch": [64, 64]}},
        ("model.hidden_sizes=[64,64]", "actor.optim.lr=1e-3", "actor.optim.value_lr=1e-3",
         "algorithm.learning_starts=100", "env.train.max_steps_per_rollout_epoch=1"),
    ),
    "lunarlander-ppo": (
        "LunarLander-v3", "ppo", 20 * 16 * 1024,
        {"n_envs": 16, "n_steps": 1024, "batch_size": 64, "gae_lambda": 0.98, "gamma": 0.999, "n_epochs": 4,
         "ent_coef": 0.01},
        ("env.train.total_num_envs=16", "env.train.max_steps_per_rollout_epoch=1024", "algorithm.gae_lambda=0.98",
         "algorithm.gamma=0.999", "algorithm.update_epoch=4", "algorithm.entropy_bonus=0.01",
         "algorithm.normalize_returns=false"),
    ),
    "hopper-ppo": (
        "Hopper-v5", "ppo", 100 * 512,
        {"normalize": True, "n_steps": 512, "batch_size": 32, "gae_lambda": 0.99, "gamma": 0.999, "n_epochs": 5,
         "ent_coef": 0.00229519, "learning_rate": 9.80828e-05, "max_grad_norm": 0.7, "vf_coef": 0.835671,
         "policy_kwargs": WIDE},
        ("env.train.total_num_envs=1", "env.train.max_steps_per_rollout_epoch=512", "algorithm.gae_lambda=0.99",
         "algorithm.gamma=0.999", "algorithm.update_epoch=5", "algorithm.entropy_bonus=0.00229519",
         "actor.global_batch_size=32", "actor.micro_batch_size=32", "actor.optim.lr=9.80828e-05",
         "actor.optim.value_lr=9.80828e-05", "actor.optim.clip_grad=0.7", *OURS_WIDE),
    ),
    "halfcheetah-ppo": (
        "HalfCheetah-v5", "ppo", 200 * 512,
        {"normalize": True, "n_steps": 512, "batch_size": 64, "gae_lambda": 0.92, "gamma": 0.98, "n_epochs": 20,
         "ent_coef": 0.000401762, "learning_rate": 2.0633e-05, "max_grad_norm": 0.8, "vf_coef": 0.58096,
         "clip_range": 0.1, "policy_kwargs": WIDE},
        ("env.train.total_num_envs=1", "env.train.max_steps_per_rollout_epoch=512", "algorithm.gae_lambda=0.92",
         "algorithm.gamma=0.98", "algorithm.update_epoch=20", "algorithm.entropy_bonus=0.000401762",
         "algorithm.clip_ratio_low=0.1", "algorithm.clip_ratio_high=0.1", "actor.optim.lr=2.0633e-05",
         "actor.optim.value_lr=2.0633e-05", "actor.optim.clip_grad=0.8", *OURS_WIDE),
    ),
    "breakout-ppo": (
        "gym_learning:MinBreakout-v0", "ppo", 200 * 8 * 128,
        {"n_envs": 8, "n_steps": 128, "batch_size": 256, "n_epochs": 4, "ent_coef": 0.01, "learning_rate": 1e-3},
        ("env.train.total_num_envs=8", "env.train.max_steps_per_rollout_epoch=128", "actor.global_batch_size=256",
         "actor.micro_batch_size=256", "algorithm.update_epoch=4", "algorithm.entropy_bonus=0.01",
         "actor.optim.lr=1e-3", "actor.optim.value_lr=1e-3", "algorithm.normalize_returns=false"),
    ),
    # Both sides learn by hindsight; ours is given demonstrations beside.
    "fetchreach-rlpd": (
        REACHING, "rlpd", 3_000, REACH,
        (*OURS_REACH, "env.wrappers=[gym_learning:Reaching]", "algorithm.updates_per_sample=1",
         "algorithm.policy_interval=1"),
    ),
    "fetchreach-sac": (REACHING, "sac", 3_000, REACH, OURS_REACH),
}  # fmt: skip
"""Environment, algorithm, number of steps, and the settings of Stable-Baselines3 and of embodyrl for each case."""


class Reaching(gymnasium.Wrapper[Any, Any, Any, Any]):
    """FetchReach with an expert that moves straight to the goal."""

    _way = np.zeros(3)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        seen, info = self.env.reset(**options)
        self._way = seen["desired_goal"] - seen["achieved_goal"]
        return seen, info

    def step(self, action: Any) -> Any:
        seen, *rest = self.env.step(action)
        self._way = seen["desired_goal"] - seen["achieved_goal"]
        return seen, *rest

    def expert_action(self) -> Any:
        """Return the gripper's velocity [3] and the command of the fingers."""
        return np.append(np.clip(10.0 * self._way, -1.0, 1.0), 0.0).astype(np.float32)


def breakout() -> Any:
    """Build MinAtar's Breakout with a state of 400 numbers and a time limit of 1000 steps."""
    from minatar.gym import BaseEnv  # pyright: ignore[reportMissingImports]

    numbers = gymnasium.wrappers.FlattenObservation(BaseEnv("breakout"))
    return gymnasium.wrappers.TimeLimit(gymnasium.wrappers.DtypeObservation(numbers, np.float32), 1000)


gymnasium.register("MinBreakout-v0", entry_point="gym_learning:breakout")


def ours(case: str, seed: int, more: list[str]) -> float:
    from embodyrl.commands.collect import collect
    from embodyrl.commands.train import train
    from embodyrl.plan.config import load_config

    env, algorithm, steps, _, settings = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "env=gym", f"env.id={env}", "model=mlp", f"algorithm={algorithm}", "launcher=inline", *settings,
            f"seed={seed}", f"eval.episodes={EPISODES}", "env.eval.total_num_envs=10", "runner.save_interval=-1",
            "runner.logger.backends=[jsonl]", f"runner.output_dir={folder}", *more,
        ]  # fmt: skip
        if algorithm == "rlpd":
            demos = f"{folder}/demos"
            settings_of_env = [word for word in words if word.startswith("env.id=") or "wrappers" in word]
            given = ("env=gym", *settings_of_env, "model=scripted", "launcher=inline", f"collect.out={demos}")
            places = (f"runner.output_dir={folder}", f"collect.episodes={DEMONSTRATIONS}")
            collect(load_config("collect", [*given, *places]))
            words.append(f"algorithm.demonstrations=[{demos}]")
        cfg = load_config("train", words)
        each = cfg.env.train.total_num_envs * (cfg.env.train.max_steps_per_rollout_epoch or 0)
        last = f"runner.max_steps={steps // each}", f"runner.val_check_interval={steps // each}"
        run = train(load_config("train", [*words, *last])).run
        rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(rows[-1]["eval/return"])


def theirs(case: str, seed: int, _: list[str]) -> float:
    import torch
    from stable_baselines3 import PPO, SAC, HerReplayBuffer
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    env, algorithm, steps, settings, _ = CASES[case]
    own: dict[str, Any] = dict(settings)
    normalize, count = own.pop("normalize", False), own.pop("n_envs", 1)
    if "activation_fn" in (kwargs := own.get("policy_kwargs", {})):
        own["policy_kwargs"] = kwargs | {"activation_fn": getattr(torch.nn, kwargs["activation_fn"])}
    vec: Any = make_vec_env(env, n_envs=count, seed=seed)
    looks: Any = make_vec_env(env, n_envs=10, seed=seed + 1000)
    if normalize:
        vec = VecNormalize(vec, gamma=own["gamma"])
        looks = VecNormalize(looks, training=False, norm_reward=False)
        looks.obs_rms = vec.obs_rms
    if own.pop("her", False):
        own["replay_buffer_class"] = HerReplayBuffer
    reads = "MultiInputPolicy" if isinstance(vec.observation_space, gymnasium.spaces.Dict) else "MlpPolicy"
    model = (PPO if algorithm == "ppo" else SAC)(reads, vec, seed=seed, device="cpu", **own)
    model.learn(steps)
    return float(evaluate_policy(model, looks, n_eval_episodes=EPISODES)[0])  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--sides", nargs="*", default=["theirs", "ours"], choices=["theirs", "ours"])
    parser.add_argument("--words", nargs="*", default=[], help="additional overrides of embodyrl")
    args = parser.parse_args()
    rows = []
    for case in args.cases:
        found: dict[str, list[float]] = {"ours": [], "theirs": []}
        for seed in args.seeds:
            for side in args.sides:
                began = time.process_time()
                found[side].append((ours if side == "ours" else theirs)(case, seed, args.words))
                print(
                    case, side, seed, round(found[side][-1], 1), f"{time.process_time() - began:.0f} CPU s", flush=True
                )
        mean = {side: statistics.mean(values) if values else 0.0 for side, values in found.items()}
        rows.append({"what": f"{case}, {CASES[case][2]} steps", "unit": "mean return", **mean, "of seeds": found})
    if args.json:
        machine = {"platform": platform.platform(), "python": platform.python_version(), "load": os.getloadavg()[0]}
        args.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
