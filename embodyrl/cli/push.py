"""The command `push`: a policy or a data set to the hub."""

import argparse
import sys

from embodyrl.cli.output import show_result
from embodyrl.config.paths import HUB_NAME, resolve_run
from embodyrl.config.trust import TRUST
from embodyrl.errors import ConfigError


def push(args: argparse.Namespace) -> int:
    """Run `embodyrl push`."""
    words = [word for word in args.words if word != TRUST]
    if len(words) != 2 or "@" in words[1] or not HUB_NAME.fullmatch(words[1]):
        raise ConfigError("embodyrl push takes a folder and a repository: embodyrl push runs/my_run me/my_policy.")
    source = resolve_run(words[0])
    if not source.is_dir():
        raise ConfigError(f"'{words[0]}' is no folder; `embodyrl list runs` shows the runs in ./runs.")
    print(f"pushing {source} to {words[1]} ...", file=sys.stderr, flush=True)
    from embodyrl.commands.push import push as upload

    pinned = upload(source, words[1], private=args.private, overrides=[w for w in args.words if w == TRUST])
    show_result(args, {"repository": words[1], "pinned": pinned}, [f"pushed {source} as {pinned}"])
    return 0
