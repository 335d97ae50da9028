"""Download of the Hugging Face Hub repositories in a config, and pinning of their commits."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from embodyrl.config.paths import HUB_NAME
from embodyrl.errors import ConfigError
from embodyrl.registry import Registry, takes

DATA_KEYS = ("data.path", "data.val_path", "data.more", "algorithm.demonstrations")
MODEL_KEYS = ("model.path", "model.lora.path", "ckpt")


def program_keys(cfg: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, repository) of each hub repository whose code the environment runs."""
    for name in cfg.env.program_keys if cfg.has("env") else ():
        value = getattr(cfg.env, name)
        if isinstance(value, str) and "@" in value and HUB_NAME.fullmatch(value):
            yield f"env.{name}", value


def is_on_hub(path: str) -> bool:
    """Return True if a path has the form owner/name of a hub repository and is not a local path."""
    found = HUB_NAME.fullmatch(path)
    if found is None or Path(path).exists() or Path(path).suffix in (".json", ".jsonl", ".parquet"):
        return False
    first = path.partition("/")[0]
    return first not in (".", "..", "assets", "runs") and not Path(first).is_dir()


def fetched(key: str, path: str) -> str:
    """Download `owner/name[@revision]` and return `owner/name@commit`; return any other path unchanged.

    Raises:
        ConfigError: the repository does not exist, or the hub cannot be reached.
    """
    if not is_on_hub(path):
        return path
    return _download(key, path, "dataset" if key in DATA_KEYS else "model", programs=False)


def fetched_program(key: str, path: str) -> str:
    """Download all files of `owner/name@revision`, including programs, and return `owner/name@commit`.

    Raises:
        ConfigError: the repository does not exist, or the hub cannot be reached.
    """
    return _download(key, path, "model", programs=True)


DOWNLOADERS: Registry[Callable[[str, str, str, bool], str]] = Registry(
    "downloader",
    group="embodyrl.downloaders",
    wants="a function of key, name, kind of repository and the choice of programs that returns owner/name@commit",
    fits=takes(4),
)


def _download(key: str, path: str, kind: str, *, programs: bool) -> str:
    for download in DOWNLOADERS.every():
        return download(key, path, kind, programs)
    raise ConfigError(
        f"{key}={path} is not a local folder, and the extension 'hub' for downloads is missing. Reinstall embodyrl."
    )


def located(key: str, value: Any) -> Any:
    """Download all hub repositories in a config value; return the value with each repository pinned to a commit."""
    if isinstance(value, list):
        return [located(key, item) for item in value]
    return fetched(key, value) if isinstance(value, str) else value
