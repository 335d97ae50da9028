"""Client of a process with embodyrl, which may have its own Python environment."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np

VARIABLE = "EMBODYRL_PYTHON"
"""Environment variable with the Python that has embodyrl."""
_CLOSING_S = 10.0


class WorkerError(RuntimeError):
    """The process failed, exited or did not reply in time; the message contains the reason."""


class Worker:
    """A process that answers requests one by one."""

    def __init__(self, script: Path, arguments: Mapping[str, Any], *, python: str | None, timeout_s: float) -> None:
        """Start the process and send the first request, `arguments`.

        Args:
            script: file that the other Python runs; its HANDLER() answers requests.
            arguments: arguments of the worker.
            python: interpreter that has embodyrl; None: the variable EMBODYRL_PYTHON, else this interpreter.
            timeout_s: limit of each reply in seconds.

        Raises:
            WorkerError: the worker cannot be built.
        """
        self._python = python or os.environ.get(VARIABLE) or sys.executable
        self._timeout_s = timeout_s
        self._pipe, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                # -P: modules of this folder must not hide packages of the other Python.
                [self._python, "-P", __file__, str(script), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise WorkerError(f"Cannot start {self._python}: {error}. Set {VARIABLE} to a Python.") from error
        finally:
            theirs.close()
        try:
            self.description = self.ask(**arguments)
            """Reply to the first request."""
        except WorkerError:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return its reply.

        Raises:
            WorkerError: the process reports an error, exited, or exceeded the limit.
        """
        try:
            self._pipe.send(encoded(request))
            if not self._pipe.poll(self._timeout_s):
                raise WorkerError(f"The process of {self._python} did not reply for {self._timeout_s:g} s.")
            reply = decoded(self._pipe.recv())
        except (EOFError, OSError) as error:
            code = self._process.wait(_CLOSING_S)
            raise WorkerError(
                f"The process of {self._python} ended with exit code {code}; see its output. Fix: install embodyrl "
                f"there, or set {VARIABLE} to the Python that has embodyrl."
            ) from error
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def close(self) -> None:
        """End the process; idempotent."""
        self._pipe.close()
        try:
            self._process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def encoded(message: Mapping[str, Any]) -> dict[str, Any]:
    """Replace arrays by type, shape and bytes, which do not depend on the version of numpy."""
    return {
        name: ("array", value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
        for name, value in message.items()
    }


def decoded(message: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `encoded`; arrays are writable."""
    return {
        name: np.frombuffer(bytearray(value[3]), value[1]).reshape(value[2])
        if isinstance(value, tuple) and value[:1] == ("array",)
        else value
        for name, value in message.items()
    }


def serve(handle: Callable[[dict[str, Any]], dict[str, Any]], descriptor: int) -> None:
    """Answer requests of the parent process until it closes the pipe with this file descriptor."""
    pipe: Any = Connection(descriptor)
    while True:
        try:
            request = decoded(pipe.recv())
        except EOFError:
            return
        try:
            reply = handle(request)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        pipe.send(encoded(reply))


if __name__ == "__main__":
    serve(runpy.run_path(sys.argv[1])["HANDLER"](), int(sys.argv[2]))
