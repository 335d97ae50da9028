"""The kinds of runs that `chaos.py` interrupts: how each starts, resumes, and which files it leaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from processes import run_cli
from test_killed_commands import dagger_words, prepare, results, sweep_words
from toy_runs import TOY_COLLECT, TOY_OFT, comparable, rows, toy_words, weights

from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.data.checks import check_layout
from embodyrl.data.reader import load_demonstrations
from embodyrl.data.tables import read_episodes

STEPS = 3
SLOW = ("env.kwargs.fault=slow", "env.kwargs.goal=1.4")
"""Settings of rollouts that take time but little CPU."""
WATCHED = ("faults.max_restarts_per_worker=1000", "faults.step_timeout_s=6", "faults.update_timeout_s=30")
TRAIN = (
    *(f"runner.max_steps={STEPS}", "runner.save_interval=1", "runner.deterministic=true"),
    *("actor.optim.lr=0.001", "runner.val_check_interval=2", "eval.episodes=2"),
)
TEXT = (
    *("env=text/reverse", "model=causal_lm_tiny", "env.train.total_num_envs=8"),
    *("algorithm.group_size=4", "actor.micro_batch_size=4", "actor.global_batch_size=8"),
    *(f"runner.max_steps={STEPS}", "runner.save_interval=1", "runner.val_check_interval=-1"),
    *("runner.deterministic=true", "launcher.env_workers=2"),
)


@dataclass(frozen=True)
class Kind:
    """A kind of run."""

    name: str
    command: str
    words: Callable[[Path], Sequence[str]]
    exact: bool = True
    """True if the run must end with the results of an undisturbed run."""
    repeats: bool = False
    """True if the same command resumes, with any number of run folders."""
    prepare: Callable[[], None] = lambda: None
    """Writes the inputs of the run, once."""

    def start(self, folder: Path) -> list[str]:
        """Return the arguments that start or resume the run."""
        run = folder / "run"
        if self.repeats or self.command == "collect" or not (run / "config.yaml").is_file():
            return [self.command, *self.words(folder)]
        if self.command == "eval" and not (run / "eval" / "step_000000").is_dir():
            return [self.command, *self.words(folder), "runner.on_existing=resume"]
        return [self.command, "--resume", str(run), "trust=true"]

    def check(self, folder: Path, *, complete: bool) -> None:
        """Check the invariants of the files while no process runs.

        Raises:
            AssertionError: an invariant is violated.
        """
        run = folder / "run"
        metrics = run / "metrics.jsonl"
        if self.command in ("train", "sft") and metrics.exists():
            steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
            first = steps[0] if steps else 0
            assert steps == [*range(first, first + len(steps))], f"rows of steps {steps}"
            assert first <= 1, f"the first row is of step {first}"
            assert not complete or steps[-1] == STEPS, f"rows of steps {steps}"
        for store in map(CheckpointStore, {run / "checkpoints", *folder.rglob("checkpoints")}):
            for step in store.steps():
                store.verify(store.path(step))
        if self.repeats:
            left = [path for path in folder.rglob("*.partial") if complete]
            assert not left, f"incomplete files: {left}"
            return
        store = CheckpointStore(run / "checkpoints")
        assert not complete or self.command not in ("train", "sft") or STEPS in store.steps()
        if self.command == "collect" and (folder / "demos/meta/info.json").exists():
            found = [(row["embodyrl/task_id"], row["embodyrl/trial"]) for row in read_episodes(folder / "demos")]
            assert len(found) == len(set(found)), f"episodes twice: {found}"
            assert not complete or check_layout(folder / "demos") == []

    def outcome(self, folder: Path) -> Any:
        """Return the results of a finished run, without clock-dependent values."""
        run = folder / "run"
        if self.repeats:
            return results(folder / "out")
        if self.command == "eval":
            played = [{k: v for k, v in row.items() if k not in ("seconds", "video")} for row in self._episodes(run)]
            return sorted(played, key=lambda row: row["episode"])
        if self.command == "collect":
            demos, sources = load_demonstrations(folder / "demos"), read_episodes(folder / "demos")
            order = sorted(
                range(len(sources)), key=lambda i: (sources[i]["embodyrl/task_id"], sources[i]["embodyrl/trial"])
            )
            spans = [slice(demos.start[i], demos.stop[i]) for i in order]
            return [(demos.state[s].tobytes(), demos.action[s].tobytes(), demos.images[s].tobytes()) for s in spans]
        if not self.exact:
            return [row["step"] for row in rows(run)]
        return [row | {"env/restarts": 0} for row in comparable(run)], weights(run, STEPS)

    def _episodes(self, run: Path) -> list[dict[str, Any]]:
        text = (run / "eval" / "step_000000" / "episodes.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]


def _toy(*words: str) -> Callable[[Path], Sequence[str]]:
    return lambda folder: toy_words(folder, *SLOW, *WATCHED, *TRAIN, "algorithm.rollout_epoch=4", *words)


SMALL_TRAIN = (
    *("runner.deterministic=true", "runner.save_interval=1", "runner.val_check_interval=1"),
    *(f"runner.max_steps={STEPS}", "eval.episodes=4"),
)
CARTPOLE = (
    *("experiment=cartpole", "env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=64"),
    *("env.eval.total_num_envs=2", "algorithm.update_epoch=2"),
)
TABLETOP = (
    *("env=tabletop", "model=openvla_oft_tiny", "env.train.total_num_envs=4", "algorithm.group_size=2"),
    *("env.train.task_ids=[0,1,2]", "actor.global_batch_size=8", "actor.micro_batch_size=8", "video=none"),
    *("env.eval.total_num_envs=2", "faults.max_restarts_per_worker=1000"),
)


def _small(*words: str) -> Callable[[Path], Sequence[str]]:
    places = lambda folder: (f"runner.output_dir={folder}", "runner.experiment_name=run")  # noqa: E731
    return lambda folder: [*words, *SMALL_TRAIN, *places(folder)]


def _collect(folder: Path) -> list[str]:
    places = (f"collect.out={folder}/demos", f"runner.output_dir={folder}/runs")
    return [
        *TOY_COLLECT,
        "env.kwargs.fault=slow",
        *WATCHED[:2],
        *places,
        "collect.episodes=24",
        "launcher.env_workers=2",
    ]


def _eval(folder: Path) -> list[str]:
    more = ("launcher.env_workers=2", "eval.episodes=32", "runner.deterministic=true", "video=all")
    return toy_words(folder, *SLOW, *WATCHED, *more, command="eval")


def _sft(demos: Path) -> Callable[[Path], Sequence[str]]:
    model = (*TOY_OFT, "model.num_action_chunks=4")
    small = ("actor.global_batch_size=8", "actor.micro_batch_size=8", "data.image_aug=false")
    steps = (f"runner.max_steps={STEPS}", "runner.save_interval=1", "runner.val_check_interval=1")
    return lambda folder: [
        *(f"data.path={demos}", f"runner.output_dir={folder}", "runner.experiment_name=run"),
        *(*model, *small, *steps, "faults.update_timeout_s=30"),
    ]


def _text(shared: Path, *reward: str) -> Callable[[Path], Sequence[str]]:
    def words(folder: Path) -> list[str]:
        places = (f"runner.output_dir={folder}", "runner.experiment_name=run", f"data.path={shared}/programs.jsonl")
        return [*TEXT, *WATCHED, *places, *reward]

    return words


def _repeated(shared: Path, words: Callable[[Path, Path], list[str]], *more: str) -> Callable[[Path], Sequence[str]]:
    return lambda folder: [*words(shared / "small", folder / "out"), *more]


def _small_inputs(shared: Path) -> Callable[[], None]:
    def write() -> None:
        if not (shared / "small").exists():
            (shared / "small").mkdir()
            prepare(shared / "small")

    return write


def _pendulum(shared: Path) -> Callable[[], None]:
    def write() -> None:
        if not (shared / "pendulum").exists():
            made = (*PENDULUM, "model=random", "collect.filter=all", "collect.episodes=3", "launcher=inline")
            places = (f"collect.out={shared}/pendulum", f"runner.output_dir={shared}/runs")
            done = run_cli("collect", *made, *places, cwd=shared)
            assert done.returncode == 0, done.stderr

    return write


PENDULUM = ("env=gym", "env.id=Pendulum-v1", "env.train.max_episode_steps=10")


def _iql(shared: Path) -> Callable[[Path], Sequence[str]]:
    small = (
        *("model=mlp", "algorithm=iql", "model.hidden_sizes=[8]", "actor.global_batch_size=8"),
        *("actor.micro_batch_size=8", "algorithm.updates_per_sample=40", "algorithm.critic_width=8"),
        *("runner.deterministic=true", "checkpoint.keep=9", "faults.max_restarts_per_worker=1000"),
        *(f"runner.max_steps={STEPS}", "runner.save_interval=1", "runner.val_check_interval=1", "eval.episodes=4"),
    )
    return lambda folder: [
        *(*PENDULUM, *small, f"algorithm.demonstrations=[{shared}/pendulum]", "launcher.env_workers=1"),
        *(f"runner.output_dir={folder}", "runner.experiment_name=run"),
    ]


def write_programs(path: Path) -> None:
    """Write rows whose answers are programs, because a tiny model hardly ever writes a program."""
    lines = [{"prompt": f"{n}=", "answer": json.dumps([f"assert {n}", "x = 1"])} for n in range(1, 40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def kinds(shared: Path, judge_url: str) -> list[Kind]:
    """Return all kinds; `shared` contains their inputs, `judge_url` is the reward service."""
    judged = (f"reward.path={judge_url}", "reward.name=null", "reward.weights={}", "reward.timeout_s=3")
    code = ("reward.name=code", "reward.weights={code:0.5,overlap:0.5}", "reward.timeout_s=8")
    return [
        Kind("inline", "train", _toy("launcher=inline")),
        Kind("cartpole", "train", _small(*CARTPOLE)),
        Kind("tabletop", "train", _small(*TABLETOP)),
        Kind("local", "train", _toy("launcher.env_workers=2")),
        Kind("ranks", "train", _toy("launcher.env_workers=1", "actor.fsdp.size=2", "env.train.total_num_envs=8")),
        Kind("apart", "train", _toy("launcher.env_workers=1", "rollout.mode=disaggregated", "model.precision=fp32")),
        Kind(
            "async",
            "train",
            _toy(
                *("launcher.env_workers=2", "algorithm.max_staleness=1", "actor.micro_batch_size=2"),
                "runner.deterministic=false",
            ),
            exact=False,
        ),
        Kind("code", "train", _text(shared, *code)),
        Kind("judge", "train", _text(shared, *judged)),
        Kind("sft", "sft", _sft(shared / "demos")),
        Kind("collect", "collect", _collect),
        Kind("eval", "eval", _eval),
        Kind("iql", "train", _iql(shared), prepare=_pendulum(shared)),
        *(
            Kind(name, command, _repeated(shared, words, *more), repeats=True, prepare=_small_inputs(shared))
            for name, command, words, more in (
                ("dagger", "dagger", dagger_words, ()),
                ("sweep", "train", sweep_words, ("runner.on_existing=resume",)),
            )
        ),
        *([Kind("ray", "train", _toy("launcher=ray", "launcher.env_workers=2"))] if find_spec("ray") else []),
    ]
