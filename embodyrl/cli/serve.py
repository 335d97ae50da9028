"""The command `serve`, which starts a policy server."""

import argparse
import json
import sys

from embodyrl.cli.output import printable
from embodyrl.cli.run import compose_with_ckpt, only_look
from embodyrl.errors import ConfigError
from embodyrl.version import __version__


def serve(args: argparse.Namespace) -> int:
    """Run `embodyrl serve`; with `--json`, standard output contains only the address and the protocol."""
    if args.json and args.dry_run:
        raise ConfigError("--json cannot be combined with --dry-run. Use --print-config, or start the server.")
    cfg = compose_with_ckpt(args)
    if only_look(args, cfg):
        return 0
    from embodyrl.serving.serve import serve as start

    def say(line: str) -> None:
        print(printable(line), file=sys.stderr if args.json else sys.stdout, flush=True)

    say(f"embodyrl {__version__} · serve · Ctrl-C ends it")

    def ready(url: str, protocol: str) -> None:
        if args.json:
            print(json.dumps({"url": url, "protocol": protocol}), flush=True)
        say(f"  listening  {url}")

    start(cfg, say=say, ready=ready)
    return 0
