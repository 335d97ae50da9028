"""Where the shipped data lies: inside the installed package, or beside it in a source checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def conf_dir() -> Path:
    """Folder of the YAML groups."""
    return _shipped("conf", marker="train.yaml")


def assets_dir() -> Path:
    """Folder of the shipped data: tiny checkpoints, text tasks, images."""
    return _shipped("assets", marker="")


def resolve_asset(path: str) -> Path:
    """Read `assets/<name>` as shipped data, whatever the working directory; any other path is taken as it is."""
    head, _, rest = path.partition("/")
    return assets_dir() / rest if head == "assets" and rest else Path(path).expanduser()


def resolve_run(path: str) -> Path:
    """Read a bare name as that of a run in ./runs, unless something of this name lies here; else as an asset."""
    named = Path("runs") / path
    return named if "/" not in path and not Path(path).exists() and named.is_dir() else resolve_asset(path)


def _shipped(name: str, *, marker: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.is_dir() and (inside / marker).exists() else _PACKAGE.parent / name
