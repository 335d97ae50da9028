"""SIGKILL of each command at five points of its file writes; the same command then completes with equal results."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from processes import command_environment, run_cli
from toy_runs import TOY_COLLECT, toy_words

from embodyrl.files import SCRATCH

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

HOOK = """
import os, signal

def _count_renames(folder, count, kill_at):
    rename = os.replace

    def replace(source, target, **kwargs):
        if os.path.abspath(os.fspath(target)).startswith(folder):
            counter = os.open(count, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(counter, b"x")
            number = os.fstat(counter).st_size
            os.close(counter)
            if number == kill_at and number % 2:
                os.killpg(0, signal.SIGKILL)
            rename(source, target, **kwargs)
            if number == kill_at:
                os.killpg(0, signal.SIGKILL)
        else:
            rename(source, target, **kwargs)

    os.replace = os.rename = replace

if "KILL_FOLDER" in os.environ:
    _count_renames(os.environ["KILL_FOLDER"], os.environ["KILL_COUNT"], int(os.environ["KILL_AT"]))
"""
"""A sitecustomize module: the n-th rename below a folder kills the process group, before it if n is odd, else after."""

SMALL = ("model.num_action_chunks=2", "model.num_images_in_input=0", "data.image_aug=false", "actor.micro_batch_size=8")
STEP_INDEX = ("launcher=inline", "runner.logger.backends=[jsonl]", "runner.deterministic=true")
LEARN = ("actor.global_batch_size=8", *SMALL)
TASKS = ("env.kwargs.tasks=2", "env.kwargs.goal=2.6", "env.train.max_episode_steps=8")


@dataclass(frozen=True)
class Case:
    """A command, the words that start it and the words that continue it after a kill."""

    command: str
    words: Callable[[Path, Path], list[str]]
    """Arguments for the shared inputs and the folder of the results."""
    again: tuple[str, ...] = ()


def _train(_: Path, out: Path) -> list[str]:
    return toy_words(out, *STEP_INDEX, "runner.max_steps=3", "runner.save_interval=1", "runner.val_check_interval=1",
                     "eval.episodes=4")  # fmt: skip


def sweep_words(shared: Path, out: Path) -> list[str]:
    return ["-m", *_train(shared, out), "seed=0,1"]


def _sft(shared: Path, out: Path) -> list[str]:
    places = (f"data.path={shared}/demos", f"runner.output_dir={out}", "runner.experiment_name=run")
    often = ("runner.max_steps=3", "runner.save_interval=1", "runner.val_check_interval=1")
    return ["model=flow_small", *STEP_INDEX, *LEARN, *places, *often]


def _collect(_: Path, out: Path) -> list[str]:
    places = (f"collect.out={out}/demos", f"runner.output_dir={out}/runs")
    return [*TOY_COLLECT, *TASKS, *STEP_INDEX[:2], *places, "collect.episodes=40"]


def _eval(_: Path, out: Path) -> list[str]:
    return toy_words(out, *STEP_INDEX, "eval.episodes=12", "video=all", command="eval")


def _convert(shared: Path, out: Path) -> list[str]:
    keys = "obs/agentview_rgb: observation.images.front, obs/ee_states: observation.state, actions: action"
    return [f"{shared}/hdf5", f"{out}/converted", f"data.keys={{{keys}}}"]


def dagger_words(shared: Path, out: Path) -> list[str]:
    places = (f"data.path={shared}/demos", f"collect.out={out}/rounds", f"runner.output_dir={out}/runs")
    few = ("runner.max_steps=3", "collect.episodes=4", "dagger.rounds=2", "runner.experiment_name=learner")
    return [*TOY_COLLECT, *TASKS, *STEP_INDEX, "model=flow_small", *LEARN, *places, *few]


RESUME = ("runner.on_existing=resume",)
CASES = [
    *(Case("train", _train, RESUME), Case("train", sweep_words, RESUME), Case("sft", _sft, RESUME)),
    *(Case("eval", _eval, RESUME), Case("collect", _collect), Case("convert", _convert)),
    Case("dagger", dagger_words),
]
NAMES = ["train", "sweep", "sft", "eval", "collect", "convert", "dagger"]


def prepare(folder: Path) -> None:
    """Write demonstrations and initial weights."""
    made = [*TOY_COLLECT, *TASKS, *STEP_INDEX[:2], f"runner.output_dir={folder}", f"collect.out={folder}/demos"]
    assert run_cli("collect", *made, "collect.episodes=4", cwd=folder).returncode == 0
    learned = ["model=flow_small", *STEP_INDEX, *LEARN, f"data.path={folder}/demos", f"runner.output_dir={folder}"]
    few = ["runner.max_steps=2", "runner.experiment_name=start", "runner.val_check_interval=-1"]
    assert run_cli("sft", *learned, *few, cwd=folder).returncode == 0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demonstrations, initial weights and an HDF5 source."""
    h5py = pytest.importorskip("h5py")
    folder = tmp_path_factory.mktemp("shared")
    prepare(folder)
    (folder / "hdf5").mkdir()
    rng = np.random.default_rng(0)
    with h5py.File(folder / "hdf5" / "pick_up_the_bowl_demo.hdf5", "w") as file:
        file.create_group("data").attrs["problem_info"] = json.dumps({"language_instruction": "pick up the bowl"})
        for number in range(40):
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"] = rng.uniform(-1, 1, (6, 7))
            demo["obs/ee_states"], demo["obs/gripper_states"] = rng.normal(size=(6, 6)), rng.normal(size=(6, 2))
            for camera in ("agentview_rgb", "eye_in_hand_rgb"):
                demo[f"obs/{camera}"] = rng.integers(0, 255, (6, 16, 16, 3), dtype=np.uint8)
    return folder


def results(folder: Path) -> dict[str, str]:
    """Return a digest of each file that holds results: weights, tables, data, episodes and metrics without times."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix in (".safetensors", ".parquet"):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name in ("metrics.jsonl", "episodes.jsonl"):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            clock = ("time/", "seconds", "video", "memory/", "env/restarts")
            kept = [{k: v for k, v in row.items() if not k.startswith(clock)} for row in rows]
            found[name] = json.dumps(sorted(map(json.dumps, kept)))
    return found


def run_killed(case: Case, words: list[str], cwd: Path, kill_at: int, folder: Path) -> tuple[int, int, str]:
    """Run a command whose n-th rename kills it; return exit code, counted renames and output."""
    hook = cwd / "hook"
    hook.mkdir(parents=True, exist_ok=True)
    (hook / "sitecustomize.py").write_text(HOOK)
    count = cwd / f"count_{kill_at}"
    environment = dict(command_environment(cwd))
    environment["PYTHONPATH"] = f"{hook}:{environment['PYTHONPATH']}"
    environment |= {"KILL_FOLDER": str(folder), "KILL_COUNT": str(count), "KILL_AT": str(kill_at)}
    done = subprocess.run(
        [sys.executable, "-m", "embodyrl.cli.main", case.command, *words],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False, start_new_session=True,
    )  # fmt: skip
    return done.returncode, count.stat().st_size if count.exists() else 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_killed_command_completes_with_equal_results(case: Case, shared: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole" / "out"
    whole.mkdir(parents=True)
    code, renames, said = run_killed(case, case.words(shared, whole), tmp_path / "whole", 0, whole)
    assert code == 0, said
    assert renames >= 5, said
    expected = results(whole)
    # The last rename of `convert` completes it: a second call does not replace the result.
    renames -= case.command == "convert"
    for number in sorted({max(1, round(renames * part)) for part in (0.05, 0.3, 0.55, 0.8, 1.0)}):
        cwd = tmp_path / f"killed_{number}"
        out = cwd / "out"
        out.mkdir(parents=True)
        code, _, said = run_killed(case, case.words(shared, out), cwd, number, out)
        assert code == -signal.SIGKILL, f"rename {number} of {renames}: {said}"
        code, _, said = run_killed(case, [*case.words(shared, out), *case.again], cwd, 0, out)
        assert code == 0, f"after a kill at rename {number} of {renames}: {said}"
        found = results(out)
        differing = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
        assert not differing, f"after a kill at rename {number} of {renames}: {differing}"
        left = [p for p in out.rglob("*") if p.name.endswith(".partial") or p.name.startswith(SCRATCH)]
        # Each attempt of `collect` makes a run folder of its own.
        left = [p for p in left if not (case.command == "collect" and p.is_relative_to(out / "runs"))]
        assert not left, f"after a kill at rename {number} of {renames}: {left}"
        shutil.rmtree(cwd)
