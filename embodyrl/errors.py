"""Errors for users: each says what, where, the likely cause and the fix, and carries its exit code."""

import signal

_hidden: dict[str, str] = {}


def hide(name: str, value: str) -> None:
    """Keep the value of an environment variable out of all that is written and printed; a path is no secret."""
    if len(value) >= 6 and not value.startswith(("/", "~", ".")):  # shorter ones would blot out half of every text
        _hidden[value] = name


def masked(text: str) -> str:
    """The text with `${oc.env:NAME}` in place of each hidden value."""
    for value, name in _hidden.items():
        text = text.replace(value, f"${{oc.env:{name}}}")
    return text


def one_line(error: BaseException) -> str:
    """What a foreign error says, without line breaks and not endlessly."""
    return " ".join(str(error).split())[:300]


class EmbodyError(Exception):
    """Base of all errors that are reported without a traceback."""

    exit_code = 1


class ConfigError(EmbodyError):
    """One or more configuration problems, one line each."""

    exit_code = 2

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class UnknownNameError(ConfigError):
    """A name that no registry knows."""


class MissingDependencyError(ConfigError):
    """An optional package or system library is not installed."""


class EnvError(EmbodyError):
    """An environment broke its contract (shape, dtype, non-finite value)."""


class WorkerError(EmbodyError):
    """A worker died, hung, or used up its restart budget."""

    exit_code = 4


class ClusterLost(WorkerError):
    """No worker can be started any more; the running ones may still answer, so state is saved before exit."""


class ChannelClosed(EmbodyError):
    """The other side of a channel is gone."""

    exit_code = 4


class ChannelTimeout(EmbodyError):
    """Nothing arrived on a channel before the deadline."""

    exit_code = 4


class StaleTicketError(EmbodyError):
    """A ticket names a record that has been recycled since."""

    exit_code = 4


class NonFiniteError(EmbodyError):
    """A loss, gradient or advantage is NaN or infinite; no step was taken with it."""

    exit_code = 5


class CheckpointError(EmbodyError):
    """A checkpoint is missing, incomplete, corrupt, or does not fit."""

    exit_code = 6


class Interrupted(EmbodyError):
    """A signal asked the run to stop; state is saved before exit."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.exit_code = 128 + signum
        super().__init__(f"stopped by {signal.Signals(signum).name}")


PARENT_EXITED = signal.SIGUSR2
"""Tells a run that whoever started it was asked to stop, or is gone: it stops as well, like on SIGTERM. A batch system
that signals every process has told the run already, so this one is never the second signal that ends it at once."""


class StoppedAtOnce(KeyboardInterrupt):
    """A second signal; nothing is waited for."""

    def __init__(self, signum: int) -> None:
        self.exit_code = 128 + signum
        super().__init__(f"stopped at once by a second signal, {signal.Signals(signum).name}; what was saved is whole")
