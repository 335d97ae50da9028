"""Measure the overlap of simulation and inference: the scheduler against the ideal max(simulator, policy) and against
lock-step, with a simulator and a policy that take a known time and compute nothing.

The times are sleeps, so that a few cores can emulate many simulators and an accelerator; the benchmark measures the
scheduling, its messages and its wake-ups. Each of `--workers` processes has four environments and steps the
environments one by one, `--sim` seconds per chunk. Inference takes `--sim` divided by the number of workers per
observation, so that simulators and policy are balanced. A straggler is a worker, or an occasional chunk, that takes
five times as long.

    python benchmarks/overlap.py --json overlap.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from embodyrl.config.settings import Seconds
from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import EnvSettings
from embodyrl.envs.simulators import SequentialSimulators, SimStep
from embodyrl.files import available_cores
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.plan.episodes import EpisodeBatch, EpisodeList
from embodyrl.plan.run_plan import RunPlan
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.settings import ModelSettings
from embodyrl.policies.untrained.policy import UntrainedFactory, UntrainedPolicy
from embodyrl.scheduler.env_states import Phase
from embodyrl.scheduler.rollout import Rollout
from embodyrl.scheduler.scheduler import RolloutScheduler
from embodyrl.scheduler.start import RolloutWorkers, start_workers
from embodyrl.types import (
    ActionSpec,
    CameraSpec,
    EnvSpec,
    Episode,
    EpisodeSpec,
    FloatArray,
    Observation,
    ObservationOut,
    PolicyOutput,
)

SLOTS = 4
"""Number of environments of a worker."""
STRAGGLER = 5.0
"""Slow-down factor of a straggler."""
SLOWNESS = (0.0, 1.0, 1.0 / 48.0)
"""Fraction of slow chunks of each initial state: none, all, or occasional."""
EPISODE = 4
"""Chunks of an episode."""


class SleepySims(SequentialSimulators):
    """Simulator whose steps take `step_s` seconds; the reset id determines the fraction of slow steps."""

    def __init__(self, spec: EnvSpec, cost: float) -> None:
        super().__init__(spec)
        self._cost = cost
        self._slowness: dict[int, float] = {}
        self._rng = np.random.default_rng(os.getpid())

    def reset_env(self, env_index: int, reset_id: int, seed: int) -> None:
        self._slowness[env_index] = SLOWNESS[reset_id]

    def step_env(self, env_index: int, action: FloatArray) -> SimStep:
        slow = self._rng.random() < self._slowness[env_index]
        time.sleep(self._cost * (STRAGGLER if slow else 1.0))
        return SimStep(reward=0.0, terminated=False, success=False)

    def observe_env(self, env_index: int, out: ObservationOut) -> None:
        out.images[...] = 0


class SleepySettings(EnvSettings):
    """Keys of `SleepySims`."""

    step_s: Seconds = 0.05
    """Duration of a step in seconds."""


class SleepyEnv:
    """`EnvFactory` of `SleepySims`."""

    settings = SleepySettings

    def validate(self, cfg: SleepySettings) -> list[str]:
        return []

    def spec(self, cfg: SleepySettings, context: EnvContext) -> EnvSpec:
        return EnvSpec(
            name="sleepy", action=ActionSpec(dim=1), tasks=("wait",), states_per_task=(3,),
            cameras=CameraSpec(names=("front",), size=(64, 64)),
            max_episode_steps=10**6,
        )  # fmt: skip

    def make(self, cfg: SleepySettings, context: EnvContext) -> ChunkedEnv:
        sims = SleepySims(self.spec(cfg, context), cfg.step_s)
        return ChunkedEnv(sims, context.num_envs, use_rel_reward=False, reward_coef=1.0)


class SleepyPolicy(UntrainedPolicy):
    """Random actions after `OVERLAP_POLICY` seconds for each observation."""

    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        time.sleep(float(os.environ["OVERLAP_POLICY"]) * len(obs))
        return super().act(obs, noise=noise, temperature=temperature)


class SleepyPolicyFactory(UntrainedFactory):
    """Builds `SleepyPolicy`."""

    def build(self, cfg: ModelSettings, request: PolicyRequest) -> SleepyPolicy:
        return SleepyPolicy(self.spec(cfg, request.env, 0), request.env.action)


ENV = SleepyEnv()
POLICY = SleepyPolicyFactory(name="sleepy", scripted=False)


class LockStep(RolloutScheduler):
    """Scheduler in lock-step: all environments simulate, then inference runs for all environments."""

    def _dispatch_inference(self) -> bool:
        complete = np.isin(self._envs.phase, (Phase.READY, Phase.IDLE)).all()
        return bool(complete) and super()._dispatch_inference()


def start(workers: int, sim: float, logs: Path) -> tuple[RolloutWorkers, RunPlan]:
    """Start the real launcher, workers and policy process."""
    os.environ["OVERLAP_POLICY"] = str(sim / workers)
    num_envs = workers * SLOTS
    words = [
        "env=libero_10", "launcher=local", f"launcher.env_workers={workers}", f"env.eval.total_num_envs={num_envs}",
        f"eval.episodes={num_envs}", "env.env_type=overlap:ENV", "env.eval.state_ids=null", f"env.step_s={sim}",
        "model=random", "model.model_type=overlap:POLICY", "model.num_action_chunks=1",
        f"env.eval.max_episode_steps={EPISODE}",
    ]  # fmt: skip
    run_plan = build_run_plan(load_config("eval", words), training=False)
    return start_workers(run_plan, logs, print), run_plan


def scheduler(running: RolloutWorkers, run_plan: RunPlan, stages: int, *, lock_step: bool) -> RolloutScheduler:
    """Attach another scheduler to the running workers."""
    kind = LockStep if lock_step else RolloutScheduler
    changed = run_plan.cfg.updated({"rollout.pipeline_stage_num": stages})
    new = kind(running.supervisor, running.arena, running.policy, replace(run_plan, cfg=changed))
    for worker in run_plan.env_workers:
        running.supervisor._callbacks[worker.name] = partial(new.on_message, worker.name)
    return new


def chunks_per_second(rollouts: RolloutScheduler, straggle: str, chunks: int) -> float:
    """Return the rate from the first end of an episode until the fastest environment begins its last episode."""
    num_envs = len(rollouts._envs.each)

    def queue(env_index: int) -> tuple[EpisodeSpec, ...]:
        kind = {"none": 0, "one": int(env_index < SLOTS), "random": 2}[straggle]
        return tuple(
            EpisodeSpec(
                episode_id=i * num_envs + env_index,
                reset_id=kind,
                task_id=0,
                group_id=0,
                member=0,
                seed=0,
                noise_seed=env_index,
            )
            for i in range(chunks // EPISODE)
        )

    wave = EpisodeBatch(queues=tuple(queue(env_index) for env_index in range(num_envs)))
    plan = EpisodeList(
        num_envs=num_envs, max_episode_steps=EPISODE, max_chunks=EPISODE, ignore_terminations=True, waves=(wave,)
    )
    seen: list[tuple[float, int]] = []
    ended: Counter[int] = Counter()

    def note(episode: Episode) -> None:
        before = max(ended.values(), default=0)
        ended[episode.spec.episode_id % num_envs] += 1
        if max(ended.values()) > before:
            seen.append((time.perf_counter(), rollouts._stats.env_steps))

    rollouts.collect(Rollout(plan, keep=False, on_episode=note))
    (begin, first), (end, last) = seen[0], seen[-2]
    return (last - first) / (end - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--sim", type=float, default=0.1, help="duration of a chunk in seconds")
    parser.add_argument(
        "--chunks", type=int, default=24, help="number of chunks per environment, at least three episodes"
    )
    args = parser.parse_args()
    if args.workers < 1 or args.sim <= 0 or args.chunks < 3 * EPISODE:
        parser.error(f"expected --workers of at least 1, --sim above 0 and --chunks of at least {3 * EPISODE}")
    rows: list[dict[str, object]] = []
    logs = tempfile.TemporaryDirectory()
    running, run_plan = start(args.workers, args.sim, Path(logs.name))

    def run(what: str, stages: int, straggle: str = "none", *, lock_step: bool = False) -> float:
        speed = chunks_per_second(scheduler(running, run_plan, stages, lock_step=lock_step), straggle, args.chunks)
        print(f"{what:46} {speed:8.1f} chunks/s", flush=True)
        return speed

    def row(what: str, ours: float, against: str, theirs: float, goal: float | None) -> None:
        ratio = round(ours / theirs, 3)
        print(f"{what:46} {ratio:8.3f} x {against}", flush=True)
        rows.append(
            {"what": what, "unit": "chunks/s", "ours": round(ours, 2), "against": against, "theirs": round(theirs, 2),
             "ratio": ratio, "goal": goal}
        )  # fmt: skip

    try:
        lock = run("lock-step", 1, lock_step=True)
        speeds = {stages: run(f"ready queue, {stages} stages", stages) for stages in (1, 2, 4)}
        for stages, speed in speeds.items():
            row(f"{stages} stages", speed, "ideal max(simulator, policy)", args.workers / args.sim, 0.9)
        row("2 stages", speeds[2], "lock-step", lock, None)
        for straggle, name in (("one", "one straggler at 5x"), ("random", "random stragglers at 5x")):
            slow = run(f"ready queue, {name}", 2, straggle)
            slow_lock = run(f"lock-step, {name}", 1, straggle, lock_step=True)
            row(f"2 stages, {name}", slow, "2 stages without", speeds[2], 0.9)
            row(f"lock-step, {name}", slow_lock, "lock-step without", lock, None)
    finally:
        running.close()
        logs.cleanup()
    if args.json:
        machine = {"platform": platform.platform(), "cores": available_cores(), "load": os.getloadavg()[0]}
        args.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
