"""What a command prints: human-readable lines, or JSON for machines."""

import argparse
import json
from collections.abc import Iterable
from typing import Any


def show_result(args: argparse.Namespace, data: Any, lines: Iterable[str]) -> None:
    """Print `data` with `--json`, `lines` without."""
    print(json.dumps(data, indent=2, default=str) if args.json else "\n".join(lines))
