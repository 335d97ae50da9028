"""Execution of third-party code in a separate process, which is killed with all its children."""

import importlib
import json
import multiprocessing
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from embodyrl import errors
from embodyrl.errors import EmbodyError
from embodyrl.process_cleanup import (
    end_children_at_exit,
    format_counts,
    get_signal_name,
    kill_marked_children,
    list_remaining_children,
    list_remaining_threads,
    mark_children,
    signal_at_parents_end,
    skip_destructors,
)

T = TypeVar("T")

_TIMEOUT_S = 180.0
_LOG_BYTES = 65536
"""Maximum number of bytes that are read from the end of a log."""
_QUIET_OPTIONS = ("-W", "ignore:resource_tracker:UserWarning")
"""Python options that hide warnings of the resource tracker: the last line of the log must be the failure's reason."""
_CALL_CODE = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from embodyrl.isolation import run_call
run_call()
"""


class NoResultError(Exception):
    """Raised if the process crashed, exited or did not reply in time; the message contains the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """Exit code and log of an ended process."""

    code: int | None
    """Exit code, negative for a signal; None: the deadline passed."""
    timeout_s: float
    output: str
    log: str
    """End of the standard error of the process."""

    @property
    def reason(self) -> str:
        """Return the reason for a missing result: the deadline, the signal, or the last line of the log."""
        lines = self.log.strip().splitlines()
        if self.code is None:
            return f"no response within {self.timeout_s:g} s"
        if self.code < 0:
            return f"killed by {get_signal_name(-self.code)}"
        return lines[-1] if lines else f"exit code {self.code}"


def run_isolated(
    code: str, input_data: bytes = b"", *, arguments: Sequence[str] = (), timeout_s: float = _TIMEOUT_S
) -> ProcessResult:
    """Run Python code in a separate process with `input_data` as standard input; kill its remaining child processes."""
    # Files instead of pipes: a child of the process may keep a pipe open.
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as log:
        stdin.write(input_data)
        stdin.seek(0)
        name = f"isolated {secrets.token_hex(8)}"
        with mark_children(name):
            process = subprocess.Popen(
                [sys.executable, *_QUIET_OPTIONS, "-c", code, *arguments],
                stdin=stdin,
                stdout=output,
                stderr=log,
                start_new_session=True,
            )
        exit_code = None
        try:
            exit_code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
            kill_marked_children(name)
        output.seek(0)
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
        text, end = output.read().decode(), log.read().decode(errors="replace")
        return ProcessResult(code=exit_code, timeout_s=timeout_s, output=text, log=end)


def call_isolated(function: str, *arguments: Any, kind: type[T], timeout_s: float = _TIMEOUT_S) -> T:
    """Call `package.module:function` in a separate process; the function returns JSON, tuples or dataclasses (`kind`).

    Raises:
        EmbodyError: raised by the function.
        NoResultError: the process crashed, exited or did not reply in time.
    """
    input_data = pickle.dumps([path or os.getcwd() for path in sys.path]) + pickle.dumps((function, arguments))
    process_result = run_isolated(_CALL_CODE, input_data, timeout_s=timeout_s)
    if process_result.code != 0:
        failure: Exception = NoResultError(process_result.reason)
    else:
        reply = json.loads(process_result.output)
        if "result" in reply:
            return TypeAdapter(kind).validate_python(reply["result"])
        # Errors are transferred as class name and text: both processes have the same classes.
        failure = getattr(errors, reply["error"])(reply["text"])
    failure.add_note(f"Log of the process:\n{process_result.log}")
    raise failure


def run_call() -> None:
    """Call the function named in standard input, and write its result to standard output.

    The function runs in a fork, because `multiprocessing` frees semaphores and temporary folders of its own processes.
    """
    signal_at_parents_end(signal.SIGKILL)
    child = multiprocessing.get_context("fork").Process(target=_write_result, args=pickle.load(sys.stdin.buffer))
    child.start()
    child.join()
    assert child.exitcode is not None
    if child.exitcode < 0:
        os.kill(os.getpid(), -child.exitcode)
    sys.exit(child.exitcode)


def _write_result(name: str, arguments: tuple[Any, ...]) -> None:
    signal_at_parents_end(signal.SIGKILL)
    end_children_at_exit()
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # redirects output of C code, too
    sys.stdout = sys.stderr
    code = 1
    try:
        module, _, attribute = name.partition(":")
        function = getattr(importlib.import_module(module), attribute)
        try:
            text = json.dumps({"result": to_jsonable_python(function(*arguments))})
        except EmbodyError as error:
            traceback.print_exc()
            text = json.dumps({"error": type(error).__name__, "text": str(error)})
        reply.write(text)
        reply.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        skip_destructors(code)  # threads of foreign code would keep the process alive


def wait_for_leftovers(
    seconds: float, threads: Collection[threading.Thread] = (), children: Collection[int] = ()
) -> str:
    """Wait up to `seconds` for new threads and child processes to end, and describe those that still run.

    Threads in `threads` and processes in `children` are not new.
    """
    deadline = time.monotonic() + seconds
    while remaining := [
        *(f"thread {name}" for name in list_remaining_threads(threads)),
        *(f"process {pid} ({command})" for pid, command in list_remaining_children(children).items()),
    ]:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.02)
    return format_counts(remaining)
