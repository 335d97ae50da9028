"""Programs in the sandbox: results, limits, isolation and cleanup."""

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from processes import wait_until

from embodyrl.envs.text.protocol import Answer
from embodyrl.envs.text.reward_runner import build_reward_runner
from embodyrl.text import sandbox
from embodyrl.text.rewards.functions import code
from embodyrl.text.rewards.settings import TextRewardSettings
from embodyrl.text.sandbox import probe_sandbox, run_python, run_tests

pytestmark = pytest.mark.integration  # each program runs in a process of its own

LANDLOCK = ctypes.CDLL(None).syscall(444, None, 0, 1)
"""Version of Landlock; -1: the kernel has none."""


@pytest.fixture(autouse=True, params=["limits", "bubblewrap"])
def held(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs with and without bubblewrap, if installed; checks that programs leave no folder."""
    if request.param == "bubblewrap" and not sandbox._get_bubblewrap_command():
        pytest.skip("bubblewrap does not work here")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    if request.param == "limits":
        monkeypatch.setattr(shutil, "which", lambda _: None)
        monkeypatch.setenv("PATH", "")
    sandbox._get_bubblewrap_command.cache_clear()
    yield
    monkeypatch.undo()
    sandbox._get_bubblewrap_command.cache_clear()


def descendants(pid: int) -> list[int]:
    try:
        children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [below for child in children for below in descendants(child)]


def test_code_reward_is_the_fraction_of_passed_tests():
    answer = "Here:\n```python\ndef f(x):\n    return x * 2\n```\n"
    assert code("", answer, json.dumps(["assert f(2) == 4", "assert f(0) == 1"])) == 0.5


@pytest.mark.parametrize(
    "program",
    [
        "quit()",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def f(x):\n    import os; os._exit(0)",
        "def f(x):\n    raise SystemExit(0)",
        "import os\nfor n in range(3, 64):\n    try: os.write(n, b'x' * 16)\n    except OSError: pass\nos._exit(0)",
    ],
)
def test_program_that_exits_early_passes_no_test(program: str):
    assert code("", program, json.dumps(["assert f(2) == 4"])) == 0.0


def test_correct_program_passes_150_tests():
    tests = [f"assert f({i}) == {2 * i}" for i in range(150)]
    judge = build_reward_runner(TextRewardSettings(name="code", timeout_s=60), 8)
    try:
        (found,) = judge([Answer(prompt="", response="def f(x): return x * 2", reference=json.dumps(tests), tokens=3)])
    finally:
        judge.close()
    assert (found.reward, found.problem) == (1.0, None)


@pytest.mark.integration
def test_sleeping_program_affects_only_its_own_reward():
    judge = build_reward_runner(TextRewardSettings(name="code", timeout_s=5), 8)
    answers = [("import time; time.sleep(60)", ["assert True"] * 120), ("x = 1", ["assert x == 1"])]
    try:
        found = judge([Answer(prompt="", response=p, reference=json.dumps(t), tokens=3) for p, t in answers])
    finally:
        judge.close()
    assert [f.reward for f in found] == [0.0, 1.0]


def test_program_ends_if_its_verifier_is_killed(tmp_path: Path):
    """The process group of the verifier is killed while the program sleeps, when its process and folder exist."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        run_python("import ctypes, time; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); time.sleep(60)", seconds=60)
        os._exit(0)
    assert wait_until(lambda: len(descendants(pid)) >= 2, 30)
    below = descendants(pid)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert wait_until(lambda: not [p for p in below if alive(p)], 5)
    assert list((tmp_path / "tmp").iterdir()) == []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def test_resource_limits_end_a_program():
    assert run_python("print(6 * 7)", seconds=20) == (True, "42\n")
    assert run_python("while True: pass", seconds=1) == (False, "stopped after 1 s")
    assert run_python("x = 'a' * (1 << 31)", seconds=20) == (False, "MemoryError")
    assert run_python("import sys; sys.exit('no')", seconds=20) == (False, "no")
    ended, why = run_python("open('f', 'w').write('a' * (4 << 20))", seconds=20)
    assert not ended, why


MAPPED = """
import ctypes, os
libc, block = ctypes.CDLL(None), bytes(1 << 20)
for k in range(200):
    file = os.open("file", os.O_RDWR | os.O_CREAT)
    try: complete = os.write(file, block) == len(block)
    except OSError: complete = False
    if not complete: os._exit(7)
    libc.mmap(None, ctypes.c_size_t(4096), 1, 1, file, ctypes.c_long(0))
    os.unlink("file")
    os.close(file)
"""


def test_deleted_files_that_are_still_mapped_are_limited_in_size():
    if not sandbox._get_bubblewrap_command():
        pytest.skip("without bubblewrap, the file system of the folder is shared")
    assert run_python(MAPPED, seconds=20) == (False, "exit code 7")


def test_program_output_is_limited_in_size():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for loop in ("print('x' * 100_000)", "os.write(2, b'x' * 100_000)"):
        ended, why = run_python(f"import os\nwhile True: {loop}", seconds=20)
        assert not ended
        assert len(why) <= 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_program_cannot_start_processes_or_threads():
    fork = "import os\nif not os.fork():\n    os.setsid()\n    os.fork()\n    import time; time.sleep(60)"
    thread = "import threading; threading.Thread(target=print).start()"
    assert "Resource temporarily unavailable" in run_python(fork, seconds=20)[1]
    assert "can't start new thread" in run_python(thread, seconds=20)[1]


def test_program_is_not_root_and_can_import_packages():
    """Also if Python is in a folder that only root may enter."""
    source = "import os, fractions, encodings.idna, numpy; print(os.getuid() > 0, numpy.ones(2) @ numpy.ones(2))"
    assert run_python(source, seconds=20) == (True, "True 2.0\n")


def test_program_cannot_kill_its_verifier():
    """Without permission the attempt fails; with permission (same user, no bubblewrap) only the answer is lost."""
    ended, _ = run_python("import os; os.kill(os.getppid(), 9); print(1)", seconds=20)
    assert not ended or probe_sandbox().level == "ok"
    assert run_python("print(1)", seconds=20) == (True, "1\n")


@pytest.mark.skipif(LANDLOCK < 1, reason="the kernel has no Landlock")
def test_sandbox_blocks_every_escape_attempt_of_doctor():
    assert "reaching" not in probe_sandbox().text


@pytest.mark.integration
def test_escape_attempts_of_doctor_succeed_outside_the_sandbox(tmp_path: Path):
    """The sandbox must cause the failures in the sandbox. Some kernels and containers block a few attempts anyway."""
    (tmp_path / "work").mkdir()
    source = sandbox.build_escape_program().replace("/dev/shm/embodyrl", f"{tmp_path}/shm")
    source = source.replace("os.getppid()", "os.getpid()")
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path / "work", capture_output=True, text=True)
    assert not done.stderr
    kept = {
        "kernel keys",
        "io_uring",
        "userfaultfd",
        "tracing",
        "mounts of the host",
        *(["memory of Landlock"] if LANDLOCK < 1 else []),
    }
    assert {*sandbox._ESCAPE_STATEMENTS} - {*done.stdout.splitlines()} <= kept


def test_long_source_code_runs():
    assert run_python("x = 1\n" * 100_000 + "print(x)", seconds=60) == (True, "1\n")


def test_program_has_no_environment_variables(monkeypatch):
    monkeypatch.setenv("A_SECRET", "value")
    assert run_python("import os; print('A_SECRET' in os.environ)", seconds=20) == (True, "False\n")


def test_program_can_access_its_own_folder_only(tmp_path: Path):
    """Attempts to leave files, exceed memory, affect other programs or reach the network."""
    shared = "import ctypes, os, socket, time\nlibc = ctypes.CDLL(None)\n"
    attacks = [
        f"open('{tmp_path}/left', 'w')",
        "open('/dev/shm/embodyrl-left', 'w')",
        "os.mkdir('deeper')",
        "os.chmod('.', 0o777)",
        "os.kill(-1, 9)",
        "os.memfd_create('beside the limit')",
        "socket.socket()",
        "kept = [os.open('f', os.O_CREAT | os.O_RDWR) for k in range(100)]",
        "end = time.monotonic() + 1\nfor k in range(100): open(str(k), 'w')\nwhile time.monotonic() < end: pass",
        "assert libc.shmget(0, 1 << 26, 0o600) >= 0",
        "assert libc.unshare(0x10000000) == 0",
    ]
    tmp_path.chmod(0o777)
    passed = run_tests(shared, ["assert libc.getpid() > 0", *attacks], seconds=60)
    assert [True, *[False] * len(attacks)] == passed, [a for a, p in zip(attacks, passed[1:], strict=True) if p]
    assert not (tmp_path / "left").exists()
    assert not Path("/dev/shm/embodyrl-left").exists()


LEAKS = """
import os, sys
wanted, found, frame = (str(int("4831906") + 1), "'out" "put'"), [], sys._getframe().f_back
while frame:
    found += [one for one in wanted for texts in (frame.f_locals, frame.f_globals) if one in repr(texts)]
    frame = frame.f_back
for place in PLACES:
    try: found.append(open(place).read())
    except OSError: pass
for n in range(3, 64):
    for up in (".", "..", "../.."):
        try: found.append(os.listdir(os.open(up, os.O_RDONLY, dir_fd=n)))
        except OSError: pass
print(found)
"""


@pytest.mark.skipif(LANDLOCK < 1, reason="the kernel has no Landlock")
def test_program_reads_neither_tests_nor_data_nor_inherited_folders(tmp_path: Path):
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    (tmp_path / "rows.jsonl").write_text("4831907")
    places = [str(tmp_path / "rows.jsonl"), "/proc/1/cmdline", "/etc/passwd"]
    program = LEAKS.replace("PLACES", repr(places))
    ((_, code, said),) = sandbox._execute(
        program, [{"input": "", "output": "4831907\n"}], seconds=30, seconds_per_test=30
    )
    assert (code, said) == (0, "[]\n")


SHARED = """
import ctypes, errno, os, platform
libc, found = ctypes.CDLL(None, use_errno=True), []
numbers = {"x86_64": (16, 30, 31, 65, 66, 67, 69, 70, 71, 220, 241)}
numbers["aarch64"] = (29, 196, 195, 193, 191, 197, 189, 188, 187, 192, 181)
f = os.open("f", os.O_CREAT | os.O_RDWR)
size = bytes(16) + (1 << 21).to_bytes(8, "little") + bytes(24)
for number in numbers[platform.machine()]:
    for command in (0x40305828, 0x4030582A, 0x40305839):
        result = libc.syscall(number, f, command, size, 0)
        if result != -1 or ctypes.get_errno() != errno.EPERM: found.append((number, command))
print(found, os.fstat(f).st_blocks)
"""


def test_program_cannot_use_shared_memory_or_reserve_disk_space():
    assert run_python(SHARED, seconds=20) == (True, "[] 0\n")


def test_program_may_read_its_input_as_a_file():
    assert run_tests("print(open('/dev/stdin').read())", [{"input": "4", "output": "4"}], seconds=20) == [True]


def test_program_may_use_files_locks_and_asyncio():
    source = "open('f', 'w').write('4'); open('/dev/null', 'w').write('x'); import asyncio, os\n"
    source += (
        "asyncio.run(asyncio.sleep(0)); print(open('f').read(), os.isatty(0)); f = open('f', 'r+'); f.truncate(0)\n"
    )
    source += "os.set_inheritable(f.fileno(), True); open('f', 'w').close(); os.remove('f')\n"
    source += "assert os.preadv(os.open(os.devnull, 0), [bytearray(1)], 0) == 0\n"
    source += "import mmap, numpy; mmap.mmap(-1, 4096).madvise(mmap.MADV_DONTNEED)\n"
    source += "import threading; lock = threading.Lock(); assert lock.acquire() and not lock.acquire(timeout=0.01)"
    assert run_python(source, seconds=20) == (True, "4 False\n")
