"""Paths of files included with embodyrl, in the installed package or in the source checkout."""

import os
import re
from pathlib import Path

HUB_NAME = re.compile(r"(?P<owner>[\w.-]{1,96})/(?P<name>[\w.-]{1,96})(?:@(?P<revision>[\w./-]{1,200}))?")
"""Pattern of a repository on the Hugging Face Hub: owner/name, optionally with @ and a branch, tag or commit."""
PACKAGE = Path(__file__).parents[1]


def assets_dir() -> Path:
    """Return the folder of included data, such as tiny checkpoints, text tasks and images."""
    packaged = PACKAGE / "assets"
    return packaged if packaged.is_dir() else PACKAGE.parent / "assets"


def cache_dir() -> Path:
    """Return the folder of cache files, which are recreated if deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "embodyrl"


def resolve_asset(path: str) -> Path:
    """Return the local path of included data, of a snapshot in the hub's cache, or of a file.

    `assets/<name>` is included data in any working directory. `owner/name@commit` is a downloaded snapshot. Any other
    path is used unchanged.
    """
    head, _, rest = path.partition("/")
    return assets_dir() / rest if head == "assets" and rest else cached_snapshot(path) or Path(path).expanduser()


def is_on_hub(path: str) -> bool:
    """Return True if a path has the form owner/name of a hub repository and is not a local path."""
    match = HUB_NAME.fullmatch(path)
    if match is None or Path(path).exists() or Path(path).suffix in (".json", ".jsonl", ".parquet"):
        return False
    first = path.partition("/")[0]
    return first not in (".", "..", "assets", "runs") and not Path(first).is_dir()


def cached_snapshot(path: str) -> Path | None:
    """Return the folder of `owner/name@commit` in the hub's cache; None: not cached."""
    match = HUB_NAME.fullmatch(path)
    if match is None or len(match["revision"] or "") != 40:
        return None
    from huggingface_hub import constants

    names = (f"{kind}s--{match['owner']}--{match['name']}" for kind in ("model", "dataset"))
    folders = (Path(constants.HF_HUB_CACHE, name, "snapshots", match["revision"]) for name in names)
    return next((folder for folder in folders if folder.is_dir()), None)


def resolve_run(path: str) -> Path:
    """Resolve the bare name of a run to ./runs/<name>, unless the working directory contains a file with this name.

    All other paths are resolved by `resolve_asset`.
    """
    run_folder = Path("runs") / path
    return run_folder if "/" not in path and not Path(path).exists() and run_folder.is_dir() else resolve_asset(path)
