"""Compare the CPU time of `experiment=libero_laptop` between this checkout and another one.

    git worktree add ../before daf66448
    python benchmarks/laptop.py --other ../before --json laptop.json

Each side is a process with one thread that runs episodes of two groups of 8: the policy acts on 16 observations, then
each environment executes its chunk of 8 actions and renders both cameras. Afterwards the policy trains on the last
observations: optimizer steps on 128 samples in micro-batches of 32. The sides alternate after each round of chunks and
after each optimizer step, because the speed of a shared machine varies. The results are medians of the ratios of all
pairs, this checkout / other checkout. Both sides compute the same numbers: the benchmark compares images, actions,
log-probabilities and gradient norms.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
SLOTS, GROUP, CHUNK, PIXELS = 16, 8, 8, 128
CAMERAS = ("agentview", "robot0_eye_in_hand")
SUITE, FIRST_STATE = "libero_object", 20
MICRO_BATCH, BATCH = 32, 128
CHUNKS = "simulate and render"
PARTS = ("simulate", "render", CHUNKS, "act", "update")
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "LP_NUM_THREADS")}


def clock() -> float:
    """Return the CPU time of this process in ms."""
    return time.process_time() * 1e3


def build() -> tuple[Any, Any, Any, str]:
    """Build the simulators' pool, the policy, its optimizer and the instruction."""
    import torch

    from embodyrl.envs import ENVS
    from embodyrl.envs.libero import install
    from embodyrl.envs.libero.sims import SimPool
    from embodyrl.envs.libero.simulator import TaskSimulator
    from embodyrl.envs.protocol import EnvContext
    from embodyrl.learners.training import Optimization
    from embodyrl.plan.config import load_config
    from embodyrl.policies.protocol import POLICIES, PolicyRequest

    torch.set_num_threads(1)
    install.prepare_process()
    entry = install.get_suite_tasks(SUITE)[0]
    path = install.get_libero_path("bddl_files") / entry.problem_folder / entry.bddl_file
    pool = SimPool(lambda _: TaskSimulator(path, lean=True, fast=True), max_models=1)
    cfg: Any = load_config("train", ["experiment=libero_laptop"])
    spec = ENVS.get("libero").spec(cfg.env, EnvContext(num_envs=1))
    request = PolicyRequest(env=spec, device="cpu", seed=0)
    policy = POLICIES.get(cfg.model.model_type).build(cfg.model, request)
    return pool, policy, Optimization(policy.module, cfg.actor.optim, 8), spec.tasks[0]


def rounds(pool: Any, policy: Any, task: str, chunks: int, records: list[Any]) -> Iterator[dict[str, Any]]:
    """Run episodes; yield the CPU times of each round, and numbers to compare."""
    from embodyrl.envs.libero import install
    from embodyrl.types import Observation

    states, rng = install.load_init_states(SUITE, 0), np.random.default_rng(0)
    for env_index in range(SLOTS):
        pool.begin(env_index, 0).reset(states[FIRST_STATE + env_index // GROUP], env_index // GROUP)
    for _ in range(chunks):
        images = np.zeros((SLOTS, len(CAMERAS), PIXELS, PIXELS, 3), np.uint8)
        state = np.zeros((SLOTS, 8), np.float32)
        times = [clock()]
        for env_index in range(SLOTS):
            pool.use(env_index).observe(CAMERAS, images[env_index], state[env_index])
        times.append(clock())
        obs = Observation(images=images, state=state, instructions=(task,) * SLOTS)
        noise = rng.random((SLOTS, policy.spec.tokens_per_chunk))
        out = policy.act(obs, noise=noise)
        times.append(clock())
        # The policy's gripper opens at 1 and closes at 0, LIBERO's opens at -1 and closes at 1.
        actions = np.concatenate([out.actions[..., :6], 1.0 - 2.0 * out.actions[..., 6:]], axis=-1)
        for env_index in range(SLOTS):
            for action in actions[env_index].astype(np.float32):
                pool.use(env_index).step(action)
        times.append(clock())
        render, act, simulate = np.diff(times).tolist()
        records.append((obs, out))
        yield {
            "simulate": simulate / SLOTS, "render": render / SLOTS, CHUNKS: (simulate + render) / SLOTS, "act": act,
            "seen": hashlib.sha256(images.tobytes() + out.tokens.tobytes()).hexdigest(),
            "number": float(out.logprob.sum()),
        }  # fmt: skip


def updates(policy: Any, optimization: Any, count: int, records: list[Any]) -> Iterator[dict[str, Any]]:
    """Train on the last records; yield the CPU time of each optimizer step and its gradient norm."""
    import torch

    from embodyrl.types import Observation

    batches = []
    for (first, one), (second, two) in list(zip(records[::2], records[1::2], strict=False))[-BATCH // MICRO_BATCH :]:
        images, state = (np.concatenate(pair) for pair in ((first.images, second.images), (first.state, second.state)))
        both = Observation(images=images, state=state, instructions=first.instructions + second.instructions)
        batches.append((both, np.concatenate([one.tokens, two.tokens]), np.concatenate([one.logprob, two.logprob])))
    advantage = torch.from_numpy(np.random.default_rng(0).normal(size=(MICRO_BATCH, 1, 1))).float()
    for _ in range(count):
        start = clock()
        optimization.zero_grad()
        for both, tokens, logprob in batches:
            ratio = (policy.score(both, tokens).logprob - torch.from_numpy(logprob)).exp()
            loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).mean()
            (loss * MICRO_BATCH / BATCH).backward()
        norm = float(optimization.step(0.0))
        yield {"update": clock() - start, "number": norm}


def run_side(args: argparse.Namespace) -> None:
    """Print the results of each pair as JSON, after a line of input."""
    pool, policy, optimization, task = build()
    records: list[Any] = []
    pairs = itertools.chain(
        rounds(pool, policy, task, args.chunks, records), updates(policy, optimization, args.updates, records)
    )
    for _ in sys.stdin:
        print(json.dumps(next(pairs)), flush=True)


def start(tree: Path, args: argparse.Namespace) -> subprocess.Popen[str]:
    """Start one side with the code and, if there is one, the virtual environment of a checkout."""
    own = tree / ".venv/bin/python"
    command = [str(own) if own.exists() else sys.executable, __file__, "--side"]
    command += ["--chunks", str(args.chunks), "--updates", str(args.updates)]
    environ = os.environ | ONE_THREAD | {"PYTHONPATH": str(tree)}
    environ.setdefault("MUJOCO_GL", "osmesa")
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=tree, env=environ, stdin=pipe, stdout=pipe, text=True)


def main() -> None:
    """Run both sides in turn and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="another checkout to compare with")
    parser.add_argument("--chunks", type=int, default=25, help="number of rounds; 25 chunks are a whole episode")
    parser.add_argument("--updates", type=int, default=9, help="number of optimizer steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run_side(args)
        return
    assert args.other is not None, "name another checkout with --other"
    sides = [start(tree.resolve(), args) for tree in (args.other, ROOT)]
    count = args.chunks + args.updates
    pairs: list[list[dict[str, Any]]] = [[json.loads(result_line(side)) for side in sides] for _ in range(count)]
    same = sum(one.get("seen") == two.get("seen") for one, two in pairs)
    apart = max(abs(one["number"] - two["number"]) / abs(one["number"]) for one, two in pairs)
    print(f"same images and actions in {same} of {len(pairs)} pairs, other numbers differ by {apart:.1e}")
    rows = []
    for part in PARTS if args.updates else PARTS[:-1]:
        # The first calls also pay for libraries that load late, and fill caches.
        found = np.array([(one[part], two[part]) for one, two in pairs if part in one])[1:]
        ratio = found[:, 1] / found[:, 0]
        low, middle, high = np.quantile(ratio, [0.25, 0.5, 0.75])
        other, this = np.median(found, axis=0)
        rows.append({"part": part, "other_ms": other, "this_ms": this, "ratio": middle, "quartiles": [low, high],
                     "mean_ratio": found[:, 1].mean() / found[:, 0].mean(), "pairs": len(found)})  # fmt: skip
        print(f"{part:20} {other:9.2f} ms {this:9.2f} ms  ratio {middle:.3f} ({low:.3f} to {high:.3f}), "
              f"of means {rows[-1]['mean_ratio']:.3f}, {len(found)} pairs")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def result_line(side: subprocess.Popen[str]) -> str:
    """Let a side compute its next result, and return the line."""
    assert side.stdin is not None
    assert side.stdout is not None
    side.stdin.write("\n")
    side.stdin.flush()
    while not (line := side.stdout.readline()).startswith("{"):
        assert line, "a side ended early"
    return line


if __name__ == "__main__":
    main()
