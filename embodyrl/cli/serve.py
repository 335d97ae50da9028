"""The command `serve`, which starts a policy server."""

import argparse
import json
import sys

from embodyrl.cli.run import compose_with_ckpt, handle_config_flags
from embodyrl.errors import ConfigError, clean_text
from embodyrl.version import __version__


def serve(args: argparse.Namespace) -> int:
    """Run `embodyrl serve`; with `--json`, standard output contains only the address and the protocol."""
    if args.json and args.dry_run:
        raise ConfigError("--json cannot be combined with --dry-run. Use --print-config, or remove --dry-run.")
    cfg = compose_with_ckpt(args)
    if handle_config_flags(args, cfg):
        return 0
    from embodyrl.serving.serve import serve as start_server

    def write_line(line: str) -> None:
        print(clean_text(line), file=sys.stderr if args.json else sys.stdout, flush=True)

    write_line(f"embodyrl {__version__} · serve · Ctrl-C stops the server")

    def report_ready(url: str) -> None:
        if args.json:
            print(json.dumps({"url": url, "protocol": cfg.serve.protocol}), flush=True)
        write_line(f"  listening  {url}")

    start_server(cfg, log=write_line, ready=report_ready)
    return 0
