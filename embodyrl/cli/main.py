"""Entry point of `embodyrl`: runs a command, and converts errors to messages and exit codes.

This module imports no large packages; each command imports its own modules when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import logging
import os
import shlex
import signal
import sys
import textwrap
import traceback
from collections.abc import Sequence
from typing import NoReturn

from embodyrl.cli.commands import COMMANDS, find_package_commands, overview
from embodyrl.errors import (
    CheckpointError,
    ConfigError,
    EmbodyError,
    Interrupted,
    clean_text,
)
from embodyrl.files import describe_full_disk, has_room, is_full_disk
from embodyrl.process_cleanup import exit_with_leftovers
from embodyrl.registry import closest


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports usage errors in the same format as configuration errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `{self.prog} --help` shows the usage.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: arguments without the program name; default `sys.argv[1:]`.

    Returns:
        The exit code: 0 ok, 1 failed, 2 usage or configuration, 3 a check failed, 4 workers beyond their restart
        budget, 5 non-finite numbers, 6 unusable checkpoint or full disk, 128 + n on signal n.
    """
    if argv is None:
        _open_streams()
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # avoid a scan of installed packages
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_LogFormatter())
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = 1
    try:
        code = _run(arguments)
    except KeyboardInterrupt:  # Ctrl-C while an error is printed
        code = 128 + signal.SIGINT
    finally:
        if argv is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C during the exit would print a traceback
            gc.freeze()  # the collector must not traverse all objects at exit
            exit_with_leftovers(code)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # a closed terminal or full disk must not fail the exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


class _LogFormatter(logging.Formatter):
    """Formatter for log lines, which may contain texts from untrusted files."""

    def format(self, record: logging.LogRecord) -> str:
        return clean_text(super().format(record))


_ERROR = "embodyrl: error: "


def _run(arguments: list[str]) -> int:
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()  # a closed pipe is not an error
    except BrokenPipeError:
        # The reader of our output (head, less) has exited; prevent an error of the interpreter at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as error:
        # A second signal during the response to the first, whose message may already contain the resume command.
        first = str(error.__context__) if isinstance(error.__context__, Interrupted) else ""
        _print_error(f"embodyrl: {first if 'resume' in first else str(error) or 'interrupted'}.")
        return getattr(error, "exit_code", 130)
    except Interrupted as error:
        _print_error(f"embodyrl: {error}.")
        return error.exit_code
    except EmbodyError as error:
        prefix = _ERROR if isinstance(error, ConfigError) else ""  # other errors continue with a worker's traceback
        message, *details = str(error).splitlines() or [type(error).__name__]
        _report([message, *(prefix + line for line in details)], arguments)
        return CheckpointError.exit_code if is_full_disk(error) else error.exit_code
    except (Exception, SystemExit) as error:  # a component may call sys.exit
        if is_full_disk(error):
            _report([describe_full_disk(error)], arguments)
            return CheckpointError.exit_code
        _report([_describe_unexpected(error)], arguments)
        return 1
    return code


_FIXES = {
    errno.EACCES: "Change the permissions, or choose another folder",
    errno.EPERM: "Change the permissions, or choose another folder",
    errno.EROFS: "Choose a folder that is not mounted read-only",
    errno.EMFILE: "Raise the limit of open files: ulimit -n 65536",
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.ELOOP: "Remove the loop of links",
}


def _describe_unexpected(error: BaseException) -> str:
    """Return the message of an exception that no command handles: what, where, fix."""
    if isinstance(error, OSError) and error.strerror:
        where = error.filename or "a file or socket"
        return f"{where}: {error.strerror}. {_FIXES.get(error.errno or 0, 'Check the path')}; --traceback shows more."
    if isinstance(error, MemoryError):
        return "not enough memory. Use fewer parallel environments or smaller batches; --traceback shows more."
    reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".: ")
    return f"unexpected {reason}. Report the output with --traceback."


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name == "--version":
        from embodyrl.version import __version__

        print(f"embodyrl {__version__}")
        return 0
    command = COMMANDS.get(name) or find_package_commands().get(name)
    if command is None:
        hint = closest(name, COMMANDS)
        if not hint and "=" in name:
            hint = f" Overrides come after the command: embodyrl train {shlex.quote(name)}."
        raise ConfigError(f"unknown command '{name}'.{hint} Commands: {', '.join(COMMANDS)}.")
    parser = _Parser(
        prog=f"embodyrl {name}",
        usage=command.usage,
        description=textwrap.fill(command.summary, 80),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("arguments", nargs="*", metavar=command.placeholder, help=command.arguments_help)
    for flag, options in command.flags.items():
        names = [flag_name for flag_name in (options.get("alias"), flag) if flag_name]
        parser.add_argument(*names, **{key: value for key, value in options.items() if key != "alias"})
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")
    parser.add_argument("-h", "--help", action="store_true", help="show this help and exit")
    if {"-h", "--help"} & set(arguments[1:2] if command.own_flags else arguments[1:]):
        parser.epilog = command.epilog()
        print(parser.format_help(), end="")
        return 0
    module, _, function = command.target.partition(":")
    target = getattr(importlib.import_module(module), function)
    if command.own_flags:
        return target(argparse.Namespace(arguments=arguments[1:]))
    parsed, unknown = parser.parse_known_intermixed_args(arguments[1:], argparse.Namespace(command=name))
    if unknown:
        raise ConfigError(
            f"unknown flag '{unknown[0]}'.{closest(unknown[0], command.flags)} "
            f"embodyrl {name} takes: {', '.join([*command.flags, '--traceback', '--help'])}; settings are key=value."
        )
    return target(parsed)


def _report(lines: list[str], arguments: list[str]) -> None:
    if not has_room(sys.stderr, 10.0):
        return  # there is no reader
    if "--traceback" in arguments:
        _print_error(traceback.format_exc().rstrip())
    _print_error("\n".join([_ERROR + lines[0], *lines[1:]]))


def _print_error(line: str) -> None:
    """Write a line to standard error, if the stream is open."""
    with contextlib.suppress(OSError):
        print(clean_text(line), file=sys.stderr, flush=True)


def _open_streams() -> None:
    """Open closed standard streams as /dev/null; otherwise the next opened file would receive the output."""
    for name, fd in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(fd, "w" if fd else "r", encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
