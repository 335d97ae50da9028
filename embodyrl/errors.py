"""Errors for users: what is wrong, where, the likely cause and the fix, with an exit code."""

import json
import re
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

_hidden_values: dict[str, str] = {}


def hide_value(name: str, value: str) -> None:
    """Hide the value of an environment variable in all later output; paths and short values are not hidden."""
    if len(value) >= 6 and not value.startswith(("/", "~", ".")):  # shorter values would match too much text
        # Outputs may escape a value, join its lines, or add a prefix to each line.
        forms = (value, json.dumps(value)[1:-1], " ".join(value.split()), *map(str.strip, value.splitlines()))
        _hidden_values.update({form: name for form in forms if len(form) >= 6})


def mask_hidden_values(text: str) -> str:
    """Return a text with each hidden value replaced by `${oc.env:NAME}`."""
    for value in sorted(_hidden_values, key=len, reverse=True):  # a value may contain a shorter value
        text = text.replace(value, f"${{oc.env:{_hidden_values[value]}}}")
    return text


def mask_json(text: str) -> str:
    """Return JSON with hidden values replaced in its strings; a number stays valid JSON."""
    return re.sub(r'"(?:[^"\\]|\\.)*"', lambda match: mask_hidden_values(match[0]), text)


def replace_control_characters(text: str) -> str:
    """Replace control characters, which a terminal interprets as commands, with question marks."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)


def clean_text(text: str) -> str:
    """Return a text for a terminal, without hidden values and control characters."""
    return replace_control_characters(mask_hidden_values(text))


def shorten(text: str) -> str:
    """Format text for an error message: at most about 120 characters, with escaped control characters."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in mask_hidden_values(text))
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


def one_line(error: BaseException) -> str:
    """Return the message of another package's exception in one line, truncated."""
    return mask_hidden_values(" ".join(str(error).split()))[:300]


def format_reason(error: BaseException) -> str:
    """Return the reason of another package's exception as text: the key of a `KeyError`, otherwise the message."""
    return f"no field {error}" if isinstance(error, KeyError) else one_line(error) or type(error).__name__


class EmbodyError(Exception):
    """Base class of errors that are reported without a traceback."""

    exit_code = 1


def format_error(error: BaseException) -> str:
    """Format an exception of user code in one line, with the place where it was raised."""
    if isinstance(error, EmbodyError):  # its message already contains the place and the fix
        return " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {one_line(error)}{location}"


class ConfigError(EmbodyError):
    """One or more configuration problems, one line each."""

    exit_code = 2

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class UnknownNameError(ConfigError):
    """No component is registered under a name."""


class MissingDependencyError(ConfigError):
    """An optional package or system library is not installed."""

    @classmethod
    def from_import_error(cls, package: str, error: ImportError, install: str) -> Self:
        """Return the error of a failed import; `install` is the command that installs the package."""
        if "shared object file" in str(error):  # OpenCV needs libraries that slim images lack
            install = "apt-get install libxcb1 libgl1 libglib2.0-0 libsm6 libxext6, or the package of that library"
        return cls(f"{package} cannot be imported: {error}. Fix: {install}")


class EnvError(EmbodyError):
    """An environment violated its interface contract (shape, dtype, non-finite value)."""


class NoImageError(EnvError):
    """An environment has no images, or cannot render on this machine."""


class WorkerError(EmbodyError):
    """A worker died, hung, or exceeded its restart limit."""

    exit_code = 4
    actors_reply = False
    """True if the processes with the training state may still reply, so that state is saved before exit."""


class ClusterLost(WorkerError):
    """No further worker can be started."""

    actors_reply = True


class ChannelClosed(EmbodyError):
    """The other end of a channel is closed."""

    exit_code = 4


class ChannelTimeout(EmbodyError):
    """The other end of a channel sent or read nothing before the deadline."""

    exit_code = 4


class StaleRecordError(EmbodyError):
    """A record in shared memory was freed or is not completely written, or the process that owns the memory exited."""

    exit_code = 4


class NonFiniteError(EmbodyError):
    """A loss, gradient or advantage is NaN or infinite; the optimizer step did not run."""

    exit_code = 5


class CheckpointError(EmbodyError):
    """A checkpoint is missing, incomplete, corrupt, or incompatible."""

    exit_code = 6


class Interrupted(EmbodyError):
    """The run was stopped by a signal; state is saved before exit."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.exit_code = 128 + signum
        super().__init__(f"stopped by {signal.Signals(signum).name}")


PARENT_EXITED = signal.SIGUSR2
"""Signal to a run whose parent process exited or was stopped: the run stops as on SIGTERM. Batch systems may signal all
processes first, so this signal never counts as the second signal, which exits immediately."""


class StoppedImmediately(KeyboardInterrupt):
    """A second signal arrived; the process exits without waiting for running work."""

    def __init__(self, signum: int) -> None:
        self.exit_code = 128 + signum
        super().__init__(f"stopped by a second signal, {signal.Signals(signum).name}; saved files are complete")


@contextmanager
def reject_malformed(where: object, fix: str, *more_errors: type[Exception]) -> Iterator[None]:
    """Convert errors of reading and parsing a file to a `CheckpointError`.

    Args:
        where: the file, and the part that is read.
        fix: last sentence of the error message.
        more_errors: error types of the package that reads the file.
    """
    try:
        yield
    except (OSError, AttributeError, KeyError, TypeError, ValueError, *more_errors) as error:
        raise CheckpointError(f"{where} is missing or malformed ({format_reason(error)}). {fix}") from error
