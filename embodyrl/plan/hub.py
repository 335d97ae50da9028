"""Names of hub repositories: download, and replacement of branches by commits."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodyrl.config.paths import HUB_NAME
from embodyrl.errors import ConfigError, one_line

DATA_KEYS = ("data.path", "data.val_path", "data.more", "algorithm.demonstrations")
MODEL_KEYS = ("model.path", "model.lora.path", "ckpt")
_FILES = (
    *("*.json", "*.jsonl", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.yaml", "*.parquet", "*.mp4", "*.md"),
    *("action_head--*.pt", "proprio_projector--*.pt", "vision_backbone--*.pt", "noisy_action_projector--*.pt"),
)
"""File patterns to download: data only, no programs, pickles or other formats of the same weights."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def program_keys(cfg: Any) -> Iterator[tuple[str, str]]:
    """Yield key and value of each repository of the hub whose program an environment runs."""
    for name in cfg.env.program_keys if cfg.has("env") else ():
        value = getattr(cfg.env, name)
        if isinstance(value, str) and "@" in value and HUB_NAME.fullmatch(value):
            yield f"env.{name}", value


def is_on_hub(path: str) -> bool:
    """Return whether a path can only be a repository: neither the path nor a folder with the owner's name exists."""
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
    return _download(key, path, "dataset" if key in DATA_KEYS else "model", [*_FILES])


def fetched_program(key: str, path: str) -> str:
    """Download all files of `owner/name@revision`, programs too; return `owner/name@commit`.

    Raises:
        ConfigError: the repository does not exist, or the hub cannot be reached.
    """
    return _download(key, path, "model", None)


def _download(key: str, path: str, kind: str, patterns: list[str] | None) -> str:
    from huggingface_hub import snapshot_download

    repo, _, revision = path.partition("@")
    with hub_errors(
        f"{key}={path}: no such folder here, and", "Completed downloads are kept; run the command again to continue."
    ):
        folder = snapshot_download(repo, repo_type=kind, revision=revision or None, allow_patterns=patterns)
    commit = Path(folder).name
    assert _COMMIT.fullmatch(commit), folder
    return f"{repo}@{commit}"


@contextmanager
def hub_errors(before: str, after: str) -> Iterator[None]:
    """Convert errors of `huggingface_hub` to one line between `before` and `after`.

    Raises:
        ConfigError: instead of the hub's error.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    of_http = HfHubHTTPError.__bases__[0]
    """Base error of the HTTP library of `huggingface_hub`, which differs between versions."""
    try:
        yield
    except HfHubHTTPError as error:
        code = error.response.status_code
        denied = "denies access or has no such repository or revision (log in: `hf auth login`, or HF_TOKEN)"
        reason = denied if code in (401, 403, 404) else f"answered {code}"
        cause = error
    except LocalEntryNotFoundError as error:
        reason, cause = f"cannot be reached ({_why(error.__cause__ or error)}) and its cache lacks files", error
    except (of_http, OSError, ValueError, RuntimeError) as error:  # type: ignore[misc]
        reason, cause = f"cannot be used ({_why(error)})", error
    else:
        return
    raise ConfigError(f"{before} the hub at {constants.ENDPOINT} {reason}. {after}") from cause


def _why(error: BaseException) -> str:
    return one_line(error).rstrip(".") or type(error).__name__


def located(key: str, value: Any) -> Any:
    """Return the value of a key with names on the hub replaced by `owner/name@commit`, after the download."""
    if isinstance(value, list):
        return [located(key, item) for item in value]
    return fetched(key, value) if isinstance(value, str) else value
