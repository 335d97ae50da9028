"""Execution of scripts in another Python environment, for packages that conflict with embodyrl's dependencies."""

import os
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection, Pipe
from typing import Any

from embodyrl.errors import EmbodyError, MissingDependencyError
from embodyrl.process_cleanup import mark_children

_EXIT_TIMEOUT_S = 10.0


class ExternalScript:
    """Script that runs in another Python interpreter.

    Its process ends when this object is deleted or the current process exits.
    """

    def __init__(self, python: str, script: str, *, key: str, program: str) -> None:
        """Start the script; its argument is the file descriptor of a `multiprocessing` Connection to this process.

        Args:
            python: interpreter of the other environment.
            script: path of the script, which must not import embodyrl.
            key: config key of the interpreter, for errors.
            program: name of the program, for errors.

        Raises:
            MissingDependencyError: the interpreter cannot be started.
        """
        self._python, self._program = python, program
        self._pipe, script_end = Pipe()
        try:
            with mark_children(program):
                self._process = subprocess.Popen(
                    # -P: modules of the script's folder must not hide packages of the other environment.
                    [python, "-P", script, str(script_end.fileno())],
                    pass_fds=[script_end.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={k: v for k, v in os.environ.items() if k != "PYTHONPATH" or python == sys.executable},
                )
        except OSError as error:
            raise MissingDependencyError(
                f"{key}={python} cannot be started: {error.strerror}. Set the path of a Python interpreter."
            ) from error
        finally:
            script_end.close()
        self._close = weakref.finalize(self, _close, self._pipe, self._process)

    def call(self, request: Any, limit_s: float, limit: str) -> Any:
        """Send a request and return the reply.

        Args:
            request: any object that both environments can unpickle.
            limit_s: deadline of the reply.
            limit: config key of the deadline, for errors.

        Raises:
            EmbodyError: the process ended, or did not reply in time.
        """
        try:
            self._pipe.send(request)
            if not self._pipe.poll(limit_s):
                raise EmbodyError(f"{self._program} in {self._python} did not reply within {limit_s:g} s ({limit}).")
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            self._close()  # a thread of the failed script may keep the process alive
            raise EmbodyError(
                f"{self._program} in {self._python} exited with code {self._process.returncode}. "
                "Its output is in the log of this worker."
            ) from error

    def close(self) -> None:
        """End the process. Further calls have no effect."""
        self._close()


def _close(pipe: "Connection[Any, Any]", process: "subprocess.Popen[bytes]") -> None:
    pipe.close()
    try:
        process.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
