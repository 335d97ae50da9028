"""Measure the duration of commands that should respond immediately: help, lists, keys, and a configuration error.

Each command runs several times in a new process, after a run that fills the file cache; the result is the minimum. CPU
time is reported in addition to wall time, because other programs hardly affect CPU time. The limit is half a second.

    python benchmarks/startup.py --json startup.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from embodyrl.files import available_cores

LIMIT_S = 0.5
COMMANDS = {
    "--help": 0,
    "train --help": 0,
    "list envs": 0,
    "show env=libero_10": 0,
    "train env.train.total_num_env=4": 2,
    "train env=libero_11": 2,
}
"""Arguments of each command, and the expected exit code."""


def seconds(words: list[str], code: int, folder: str) -> tuple[float, float]:
    """Return wall time and CPU time of one run."""
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "embodyrl.cli.main", *words], cwd=folder, capture_output=True, check=False
    )
    wall, after = time.perf_counter() - start, os.times()
    assert done.returncode == code, done.stderr.decode()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for typed, code in COMMANDS.items():
            seconds(typed.split(), code, folder)
            runs = [seconds(typed.split(), code, folder) for _ in range(args.turns)]
            for what, ours in (("wall", min(r[0] for r in runs)), ("CPU", min(r[1] for r in runs))):
                print(f"embodyrl {typed:34} {what:5} {ours:6.3f} s", flush=True)
                rows.append(
                    {"what": f"embodyrl {typed}, {what}", "unit": "s", "ours": round(ours, 3), "against": "limit",
                     "theirs": LIMIT_S, "ratio": round(LIMIT_S / ours, 2), "goal": 1.0}
                )  # fmt: skip
    if args.json:
        machine = {"platform": platform.platform(), "cores": available_cores(), "load": os.getloadavg()[0]}
        args.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
