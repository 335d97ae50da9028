"""Real signals in every phase of a run: the run saves, exits and can be resumed.

By default one signal of each kind is sent; `-m slow` sends the others.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from processes import (
    SETS_PATH,
    Command,
    command_environment,
    heed_signals,
    listening,
    start_cli,
    wait_until,
    workers_of,
)
from toy_gates import GATE
from toy_runs import rows, toy_words

from embodyrl.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.integration


@pytest.fixture
def start(tmp_path):
    commands: list[Command] = []

    def begin(*overrides: str, name: str = "train", **env: str) -> Command:
        training = ("runner.max_steps=50", "runner.save_interval=1") if name == "train" else ()
        workers = () if "launcher=inline" in overrides else ("launcher.env_workers=1",)
        words = toy_words(tmp_path, *training, *workers, *overrides, command=name)
        commands.append(start_cli(name, *words, cwd=tmp_path, env=env))
        return commands[-1]

    yield begin
    for command in commands:
        command.stop()


def hold_in_rollout(gate, at=40):
    return (f"env.kwargs.once={gate}", "env.kwargs.fault=gate", f"env.kwargs.at={at}")


def open_gate(gate) -> None:
    gate.with_name(gate.name + ".open").touch()


def assert_one_line_and_no_traceback(command: Command) -> str:
    assert "Traceback" not in command.printed, command.printed
    lines = command.err.read_text().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("embodyrl: ")
    return lines[0]


def assert_saved(run) -> None:
    store = CheckpointStore(run / "checkpoints")
    latest = store.latest()
    assert latest is not None
    store.verify(latest)
    assert not (run / "lock").exists()


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="int"),
        pytest.param(signal.SIGTERM, 143, id="term", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 143, id="hup", marks=pytest.mark.slow),
    ],
)
def test_signal_to_the_process_group_in_a_rollout_saves_and_exits(start, tmp_path, signum, code):
    gate = tmp_path / "gate"
    command = start(*hold_in_rollout(gate))
    command.wait_for(gate)
    command.signal_group(signum)
    open_gate(gate)
    assert command.wait() == code
    line = assert_one_line_and_no_traceback(command)
    assert "--resume" in line
    assert "checkpoints/step_0" in line
    assert "stopping after" not in command.printed
    assert_saved(tmp_path / "run")


def test_ctrl_c_in_an_update_completes_the_update(start, tmp_path):
    gate = tmp_path / "gate"
    command = start("algorithm.adv_type=toy_gates:GATED_GRPO", **{GATE: str(gate)})
    command.wait_for(gate)
    command.signal_group(signal.SIGINT)
    open_gate(gate)
    assert command.wait() == 130
    assert "after step 1" in assert_one_line_and_no_traceback(command)
    assert command.printed.count("stopping after the current") == 1
    assert (tmp_path / "run" / "checkpoints" / "step_000001").is_dir()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert_saved(tmp_path / "run")


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="int"),
        pytest.param(signal.SIGTERM, 143, id="term", marks=pytest.mark.slow),
    ],
)
def test_signal_during_worker_start_exits_cleanly(start, tmp_path, signum, code):
    command = start()
    # Workers exist but are still importing: the earliest moment at which they could print a traceback.
    assert wait_until(lambda: workers_of(command.pid) or command.process.poll() is not None, 60)
    command.signal_group(signum)
    assert command.wait() == code
    line = assert_one_line_and_no_traceback(command)
    assert line.endswith(f"resume with: {SETS_PATH}embodyrl train --resume {tmp_path / 'run'} trust=true.")
    assert not (tmp_path / "run" / "lock").exists()


def test_repeated_ctrl_c_prints_no_traceback(start, tmp_path):
    command = start("runner.max_steps=10000")
    command.wait_for(tmp_path / "run" / "metrics.jsonl", lines=1)

    def has_ended() -> bool:
        if command.process.poll() is None:
            command.signal_group(signal.SIGINT)
        return command.process.poll() is not None

    assert wait_until(has_ended, 60)
    assert command.wait() == 130
    assert "Traceback" not in command.printed, command.printed
    assert "ignored" not in command.printed, command.printed


@pytest.mark.parametrize("kind", [pytest.param("hang", marks=pytest.mark.slow), "spin"])
def test_ctrl_c_interrupts_a_hanging_inline_simulator(start, tmp_path, kind):
    marker = tmp_path / "marker"
    fault = (f"env.kwargs.once={marker}", f"env.kwargs.fault={kind}", "env.kwargs.at=40")
    command = start(*fault, "launcher=inline")
    command.wait_for(marker)
    command.signal_group(signal.SIGINT)
    assert command.wait() == 130
    assert "--resume" in assert_one_line_and_no_traceback(command)
    assert_saved(tmp_path / "run")


@pytest.mark.parametrize(
    "whole_group", [pytest.param(True, id="group", marks=pytest.mark.slow), pytest.param(False, id="driver")]
)
def test_suspended_time_does_not_count_towards_deadlines(start, tmp_path, whole_group):
    """As with Ctrl-Z and fg: a deadline of six seconds during a suspension of eight seconds."""
    gate = tmp_path / "gate"
    command = start(*hold_in_rollout(gate, at=20), "faults.step_timeout_s=3", "runner.max_steps=2")
    command.wait_for(gate)
    send = command.signal_group if whole_group else command.process.send_signal
    send(signal.SIGSTOP)
    time.sleep(8.0)  # the fault itself
    send(signal.SIGCONT)
    open_gate(gate)
    assert command.wait() == 0, command.printed
    assert [row["env/restarts"] for row in rows(tmp_path / "run")] == [0, 0]


@pytest.mark.parametrize(
    "signum",
    [pytest.param(signal.SIGINT, id="int"), pytest.param(signal.SIGTERM, id="term", marks=pytest.mark.slow)],
)
def test_second_ctrl_c_exits_immediately(start, tmp_path, signum):
    """The env worker never leaves its gate, so the first Ctrl-C alone would wait for the grace period."""
    gate = tmp_path / "gate"
    command = start(*hold_in_rollout(gate))
    command.wait_for(gate)
    worker = command.worker("env_0")
    command.signal_group(signum)
    assert wait_until(lambda: "policy" not in workers_of(command.pid), 30), "first comes the checkpoint"
    command.signal_group(signum)
    # Less than the grace period of 10 s; a busy machine takes seconds to end a process.
    assert command.wait(9.0) == 128 + signum
    assert f"saved {tmp_path / 'run'}" in assert_one_line_and_no_traceback(command)
    assert str(worker) not in workers_of(command.pid).values()
    assert_saved(tmp_path / "run")


def test_ctrl_c_in_a_sweep_saves_the_run_and_starts_no_other(tmp_path):
    gate = tmp_path / "gate"
    words = toy_words(tmp_path, "runner.max_steps=50", "launcher.env_workers=1", *hold_in_rollout(gate), "seed=0,1")
    command = start_cli("train", "-m", *words, cwd=tmp_path)
    try:
        command.wait_for(gate)
        command.signal_group(signal.SIGINT)
        # Longer than `subprocess` itself would wait for a child before killing it.
        with pytest.raises(subprocess.TimeoutExpired):
            command.wait(1.0)
        open_gate(gate)
        assert command.wait() == 130
    finally:
        command.stop()
    assert "--resume" in assert_one_line_and_no_traceback(command)
    assert_saved(tmp_path / "run-0")
    assert not (tmp_path / "run-1").exists()
    table = command.out.read_text().splitlines()[-4:]
    assert table[0].split()[:2] == ["run-0", "seed=0"]
    assert table[0].endswith("exit 130")
    assert table[1].split() == ["-", "seed=1", "-", "-", "-", "not", "started"]
    assert table[2].endswith("runner.on_existing=resume")


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="int", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, id="term"),
        pytest.param(signal.SIGHUP, 143, id="hup", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="kill"),
    ],
)
def test_signal_to_the_sweep_process_is_forwarded_to_its_run(tmp_path, signum, code):
    gate = tmp_path / "gate"
    words = toy_words(tmp_path, "runner.max_steps=50", "launcher.env_workers=1", *hold_in_rollout(gate), "seed=0,1")
    command = start_cli("train", "-m", *words, cwd=tmp_path)
    try:
        command.wait_for(gate)
        command.process.send_signal(signum)
        if signum == signal.SIGKILL:
            assert command.wait() == code
        open_gate(gate)
        assert command.wait() == code
        # The run outlives a killed sweep by as long as it saves; its line is the last thing that it does.
        assert wait_until(lambda: command.err.read_text().endswith("\n"), 60)
    finally:
        command.stop()
    assert f"resume with: {SETS_PATH}embodyrl train --resume" in assert_one_line_and_no_traceback(command)
    assert_saved(tmp_path / "run-0")
    assert not (tmp_path / "run-1").exists()


@pytest.mark.slow
def test_signal_to_all_processes_of_a_sweep_counts_once(tmp_path):
    """The run receives the signal directly and from the sweep, in either order, and still saves."""
    gate = tmp_path / "gate"
    words = toy_words(tmp_path, "runner.max_steps=50", "launcher.env_workers=1", *hold_in_rollout(gate), "seed=0,1")
    command = start_cli("train", "-m", *words, cwd=tmp_path)
    try:
        command.wait_for(gate)
        (child,) = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
        for pid in (command.pid, int(child)):
            os.kill(pid, signal.SIGTERM)
        open_gate(gate)
        assert command.wait() == 143
    finally:
        command.stop()
    assert "saved" in assert_one_line_and_no_traceback(command)
    assert_saved(tmp_path / "run-0")


@pytest.mark.slow
def test_third_ctrl_c_prints_no_traceback(start, tmp_path):
    gate = tmp_path / "gate"
    command = start(*hold_in_rollout(gate))
    command.wait_for(gate)
    command.signal_group(signal.SIGINT)
    assert wait_until(lambda: "policy" not in workers_of(command.pid), 30), "first comes the checkpoint"
    command.signal_group(signal.SIGINT)
    command.signal_group(signal.SIGINT)
    assert command.wait(5.0) == 130
    assert "Traceback" not in command.printed, command.printed
    assert_saved(tmp_path / "run")


@pytest.mark.slow
def test_ctrl_c_in_the_first_reset_of_a_validation_exits(start, tmp_path):
    gate = tmp_path / "gate"
    words = (f"env.kwargs.once={gate}", "env.kwargs.fault=gate", "env.kwargs.where=reset", "eval.episodes=2")
    command = start(*words, "runner.val_check_interval=1")
    command.wait_for(gate)
    command.signal_group(signal.SIGINT)
    open_gate(gate)
    assert command.wait() == 130
    assert "after step 0" in assert_one_line_and_no_traceback(command)
    assert_saved(tmp_path / "run")


def test_ctrl_c_in_an_evaluation_prints_how_to_resume(start, tmp_path):
    gate = tmp_path / "gate"
    words = (f"env.kwargs.once={gate}", "env.kwargs.fault=gate", "env.kwargs.where=reset", "eval.episodes=2")
    command = start(*words, name="eval")
    command.wait_for(gate)
    command.signal_group(signal.SIGINT)
    open_gate(gate)
    assert command.wait() == 130
    line = assert_one_line_and_no_traceback(command)
    again = f"{SETS_PATH}embodyrl eval --resume {tmp_path / 'run'} trust=true."
    assert line == f"embodyrl: stopped by SIGINT; resume with: {again}"


def test_killed_driver_leaves_no_worker(start, tmp_path):
    gate = tmp_path / "gate"
    command = start(*hold_in_rollout(gate))
    command.wait_for(gate)
    assert set(workers_of(command.pid)) == {"policy", "env_0"}
    assert "libtorch" not in Path(f"/proc/{command.pid}/maps").read_text(), "the driver holds no tensors"
    pids = list(workers_of(command.pid).values())
    command.process.kill()
    command.wait()
    assert wait_until(lambda: not any(alive(pid) for pid in pids), 5.0)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("signum", "said"),
    [
        (signal.SIGKILL, "died with SIGKILL"),
        pytest.param(signal.SIGSTOP, "did not respond for 8 s", marks=pytest.mark.slow),
    ],
)
def test_dead_or_stopped_policy_worker_ends_the_run_with_exit_4(start, tmp_path, signum, said):
    gate = tmp_path / "gate"
    command = start(*hold_in_rollout(gate, at=60), "faults.update_timeout_s=8")
    command.wait_for(tmp_path / "run" / "metrics.jsonl", lines=1)
    command.wait_for(gate)
    os.kill(command.worker("policy"), signum)
    open_gate(gate)
    assert command.wait() == 4
    error = command.err.read_text()
    assert f"worker policy {said}" in error
    assert "policy.log" in error
    assert_saved(tmp_path / "run")


GATED_SAVE = "model.model_type=toy_gates:GATED_CNN"


@pytest.mark.slow
def test_ctrl_c_in_a_save_completes_the_checkpoint(start, tmp_path):
    gate = tmp_path / "gate"
    command = start(GATED_SAVE, **{GATE: str(gate)})
    command.wait_for(gate)
    command.signal_group(signal.SIGINT)
    open_gate(gate)
    assert command.wait() == 130
    assert "after step 1; saved" in assert_one_line_and_no_traceback(command)
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [1]
    assert_saved(tmp_path / "run")


def test_policy_worker_killed_in_a_save_leaves_no_partial_checkpoint(start, tmp_path):
    gate = tmp_path / "gate"
    command = start(GATED_SAVE, **{GATE: str(gate)})
    command.wait_for(gate)
    os.kill(command.worker("policy"), signal.SIGKILL)
    assert command.wait() == 4
    error = command.err.read_text()
    assert "worker policy died with SIGKILL" in error
    assert f"there is no checkpoint; resume with: {SETS_PATH}embodyrl train --resume {tmp_path / 'run'}" in error
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_dead_rank_ends_all_other_ranks_immediately(start, tmp_path):
    """Rank 0 waits for the dead rank in a collective with a timeout of an hour."""
    gate = tmp_path / "gate"
    command = start("algorithm.adv_type=toy_gates:GATED_GRPO", "actor.fsdp.size=2", **{GATE: str(gate)})
    command.wait_for(gate, deadline_s=100)
    victim = command.worker("policy_1")
    assert listening([command.pid, command.worker("policy"), victim]) == {"127.0.0.1"}
    os.kill(victim, signal.SIGSTOP)
    open_gate(gate)
    os.kill(victim, signal.SIGKILL)
    assert command.wait() == 4
    assert "worker policy_1 died with SIGKILL" in command.err.read_text()
    assert not (tmp_path / "run" / "lock").exists()


def test_sigusr1_prints_the_state_and_the_run_continues(start, tmp_path):
    gate = tmp_path / "gate"
    command = start(*hold_in_rollout(gate), "runner.max_steps=3")
    command.wait_for(gate)
    os.kill(command.pid, signal.SIGUSR1)
    events = tmp_path / "run" / "logs" / "events.log"
    assert wait_until(lambda: events.is_file() and "SIGUSR1: " in events.read_text(), 60)
    assert "env_0 chunk since" in events.read_text()
    open_gate(gate)
    assert command.wait() == 0


def test_closed_streams_do_not_stop_a_run(tmp_path):
    words = toy_words(tmp_path, "launcher=inline", "runner.save_interval=1")
    script = f'exec "{sys.executable}" -m embodyrl.cli.main train "$@" <&- >&- 2>&-'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *words],
        cwd=tmp_path,
        env=command_environment(tmp_path, None),
        timeout=100,
        check=False,
    )
    assert done.returncode == 0
    assert_saved(tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


def test_closed_terminal_saves_a_checkpoint_and_exits(tmp_path):
    gate = tmp_path / "gate"
    words = toy_words(tmp_path, "launcher.env_workers=1", "runner.max_steps=50", *hold_in_rollout(gate))
    terminal, ours = os.openpty()
    streams = {"stdin": ours, "stdout": ours, "stderr": ours}
    child = subprocess.Popen(
        [sys.executable, "-m", "embodyrl.cli.main", "train", *words],
        **streams, cwd=tmp_path, env=command_environment(tmp_path, None), start_new_session=True,
        preexec_fn=lambda: (heed_signals(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
    )  # fmt: skip
    os.close(ours)
    reader = threading.Thread(target=_drain, args=(terminal, gate))
    reader.start()
    assert wait_until(gate.exists, 60)
    reader.join()
    os.close(terminal)  # the kernel sends SIGHUP, and whatever is written from now on fails
    open_gate(gate)
    assert child.wait(60) == 143
    assert_saved(tmp_path / "run")


def _drain(terminal: int, until: Path) -> None:
    while not until.exists():
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 1 << 16)
