"""Compare env steps until CartPole is solved: embodyrl and Stable-Baselines3's PPO with tuned settings.

    pip install stable-baselines3; python benchmarks/cartpole.py --json cartpole.json

Both are evaluated every 2048 steps with 20 greedy episodes; CartPole is solved at a mean return of 475. The settings
are those of rl-baselines3-zoo for CartPole-v1, and `experiment=cartpole`. One thread; CPU seconds include the
evaluations, env steps do not.
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

os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}

SOLVED, LOOK_EVERY, EPISODES, MOST_STEPS = 475.0, 2048, 20, 100_000


def ours(seed: int) -> int:
    from embodyrl.commands.train import train
    from embodyrl.plan.config import load_config

    with tempfile.TemporaryDirectory() as folder:
        words = [
            "experiment=cartpole", f"seed={seed}", f"eval.episodes={EPISODES}",
            "runner.max_steps=32", "runner.val_check_interval=4", "runner.save_interval=-1",
            "runner.logger.backends=[jsonl]", f"runner.output_dir={folder}",
        ]  # fmt: skip
        run = train(load_config("train", words)).run
        rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = 0
    for row in rows:
        steps += int(row.get("env/steps", 0))
        if row.get("eval/return", 0.0) >= SOLVED:
            return steps
    return MOST_STEPS


def theirs(seed: int) -> int:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    torch.set_num_threads(1)
    looks = make_vec_env("CartPole-v1", n_envs=10, seed=seed + 1000)
    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", n_envs=8, seed=seed), n_steps=32, batch_size=256, gae_lambda=0.8,
        gamma=0.98, n_epochs=20, ent_coef=0.0, learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left, seed=seed, device="cpu",
    )  # fmt: skip
    found: list[int] = []

    def look(values: dict[str, Any], _: dict[str, Any]) -> bool:
        if model.num_timesteps % LOOK_EVERY == 0:
            mean, _ = evaluate_policy(model, looks, n_eval_episodes=EPISODES, deterministic=True)
            if float(mean) >= SOLVED:  # type: ignore[arg-type]
                found.append(model.num_timesteps)
        return not found

    model.learn(MOST_STEPS, callback=look)
    return found[0] if found else MOST_STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    rows, steps = [], {}
    for name, run in (("theirs", theirs), ("ours", ours)):
        start = time.process_time()
        steps[name] = [run(seed) for seed in range(args.seeds)]
        print(f"{name}: steps {steps[name]}, {(time.process_time() - start) / args.seeds:.0f} CPU s a seed", flush=True)
    mean = {name: statistics.mean(found) for name, found in steps.items()}
    rows.append(
        {
            "what": f"CartPole-v1 to {SOLVED:g}, {args.seeds} seeds",
            "unit": "environment steps",
            "ours": mean["ours"],
            "against": "Stable-Baselines3 PPO, tuned",
            "theirs": mean["theirs"],
            "ratio": round(mean["theirs"] / mean["ours"], 3),
            "goal": 1.0,
        }
    )
    print(json.dumps(rows[0]))
    if args.json:
        machine = {"platform": platform.platform(), "python": platform.python_version(), "load": os.getloadavg()[0]}
        args.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
