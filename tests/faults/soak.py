"""A soak test: env workers are killed at random every five seconds, and no episode may be lost or mixed up.

    PYTHONPATH=tests:. python tests/faults/soak.py --seconds 600 --compare

First an echo environment, whose reward is its action: every record must contain a matching pair. Then training on
tabletop: the run must count each kill, exit cleanly on Ctrl-C, and leave no files. `--compare` repeats the training
without kills: all rows of metrics must be equal, because lost episodes are repeated.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from mixed_launcher import mixed_config
from processes import MARK, marked_processes, start_cli, wait_until, workers_of
from toy_runs import comparable, rows, running_crew

from embodyrl.channels.layout import Record
from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.plan.episodes import train_episodes
from embodyrl.scheduler.rollout import Rollout

PERIOD_S = 5.0
ECHO = (
    "env.kwargs.echo=true",
    "env.use_rel_reward=false",
    "algorithm.rollout_epoch=16",
    "launcher.env_workers=2",
    "faults.max_restarts_per_worker=100000",
)
TABLETOP = (
    "env=tabletop",
    "model=openvla_oft_tiny",
    "env.train.total_num_envs=4",
    "algorithm.group_size=2",
    "env.train.task_ids=[0,1,2]",
    "launcher.env_workers=2",
    "actor.global_batch_size=8",
    "runner.deterministic=true",
    "faults.max_restarts_per_worker=100000",
    "runner.save_interval=5",
)


class Killer(threading.Thread):
    """Kills a random env worker of a process every `PERIOD_S`."""

    def __init__(self, driver: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.kills = 0
        self._driver, self._choose, self._stop_now = driver, random.Random(seed), threading.Event()

    def run(self) -> None:
        while not self._stop_now.wait(PERIOD_S):
            victims = sorted(pid for name, pid in workers_of(self._driver).items() if name.startswith("env_"))
            if victims:
                os.kill(self._choose.choice(victims), signal.SIGKILL)
                self.kills += 1

    def end(self) -> int:
        self._stop_now.set()
        self.join()
        return self.kills


def soak_echo(folder: Path, seconds: float, seed: int) -> None:
    """Run rollouts with random kills; every action must match its reward."""
    with running_crew(folder, cfg=mixed_config(folder, *ECHO)) as stage:
        workers, killer = stage.workers, Killer(os.getpid(), seed)
        files = len(os.listdir("/proc/self/fd"))
        killer.start()
        end, steps, chunks = time.monotonic() + seconds, 0, 0
        while time.monotonic() < end:
            plan = train_episodes(stage.run_plan.cfg, stage.run_plan.env, steps, counts_chunk_steps=False)
            workers.scheduler.publish(steps)
            rollout = workers.scheduler.collect(Rollout(plan))
            for e in rollout.episodes:
                np.testing.assert_array_equal(e.reward, workers.arena[Record.action][e.records][..., 0])
                assert (workers.arena[Record.version][e.records] == steps).all()
                chunks += len(e.records)
            assert len(rollout.episodes) == plan.num_episodes
            workers.scheduler.release(rollout)
            assert workers.arena.num_free == workers.arena.capacity
            steps += 1
        kills = killer.end()
        assert wait_until(lambda: workers.supervisor.pump(0.1) or workers.supervisor.restarts == kills, 60), (
            f"{kills} kills, {workers.supervisor.restarts} restarts"
        )
        assert wait_until(lambda: workers.supervisor.pump(0.1) or len(workers_of(os.getpid())) == 2, 60)
        leaked = len(os.listdir("/proc/self/fd")) - files
        assert leaked <= 0, f"{leaked} file descriptors more than before"
    print(f"echo: {kills} kills = restarts, {steps} steps, {chunks} chunks paired, 0 episodes lost, 0 leaks")


def soak_training(folder: Path, seconds: float, seed: int) -> Path:
    """Train with random kills; return the run."""
    places = (f"runner.output_dir={folder}", "runner.experiment_name=soak", "runner.max_steps=100000")
    command = start_cli("train", *TABLETOP, *places, cwd=folder)
    run = folder / "soak"
    try:
        command.wait_for(run / "metrics.jsonl", lines=1, deadline_s=300)
        killer = Killer(command.pid, seed)
        killer.start()
        time.sleep(seconds)
        assert command.process.poll() is None, command.printed
        kills = killer.end()
        named = lambda: " ".join(command.printed.split()).count("; restarting it")  # noqa: E731
        assert wait_until(lambda: named() == kills, 60), f"{kills} kills, {named()} restarts"
        command.signal_group(signal.SIGINT)
        assert command.wait(120) == 130, command.printed
    finally:
        command.stop()
    CheckpointStore(run / "checkpoints").verify(sorted((run / "checkpoints").iterdir())[-1])
    done = rows(run)
    assert all(row["train/episodes"] == 4 for row in done)
    print(f"tabletop: {kills} kills = restarts, {len(done)} steps, 0 episodes lost, exit 130")
    return run


def compare(folder: Path, soaked: Path) -> None:
    """Check that the same number of steps without kills gives identical rows."""
    steps = len(rows(soaked))
    places = (f"runner.output_dir={folder}", "runner.experiment_name=calm", f"runner.max_steps={steps}")
    command = start_cli("train", *TABLETOP, *places, cwd=folder)
    assert command.wait(3600) == 0, command.printed
    pairs = list(zip(comparable(soaked), comparable(folder / "calm"), strict=True))
    for under_fire, calm in pairs:
        assert under_fire | {"env/restarts": 0} == calm | {"env/restarts": 0}
    print(f"{len(pairs)} rows equal those of a run without kills")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="a third on echo, the rest on tabletop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true")
    args = parser.parse_args()
    os.environ[MARK] = str(os.getpid())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "echo").mkdir()
        soak_echo(folder / "echo", args.seconds / 3, args.seed)
        run = soak_training(folder, args.seconds * 2 / 3, args.seed)
        if args.compare:
            compare(folder, run)
    assert wait_until(lambda: not marked_processes(), 5.0), f"left behind: {marked_processes()}"
    assert not [n for n in os.listdir("/dev/shm") if "embodyrl" in n]
    print("nothing left behind")


if __name__ == "__main__":
    main()
