"""Download of repositories from the Hugging Face hub, with one-line error messages."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from embodyrl.errors import ConfigError, one_line

_FILE_PATTERNS = (
    *("*.json", "*.jsonl", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.yaml", "*.parquet", "*.mp4", "*.md"),
    *("action_head--*.pt", "proprio_projector--*.pt", "vision_backbone--*.pt", "noisy_action_projector--*.pt"),
)
"""Patterns of the files to download: no code, no pickles, and one format of the weights."""
_COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")


def download(key: str, repo: str, kind: str, programs: bool = False, *, files: Sequence[str] = _FILE_PATTERNS) -> str:
    """Download a repository `owner/name[@revision]`; return `owner/name@commit`.

    Only files that match the patterns `files` are downloaded; with `programs`, all files are, including code.

    Raises:
        ConfigError: the repository does not exist, the hub cannot be reached, or the hub returns an invalid commit.
    """
    from huggingface_hub import snapshot_download

    repo_id, _, revision = repo.partition("@")
    with convert_hub_errors(
        f"{key}={repo}: no such folder here, and", "Completed downloads are kept; run the command again to continue."
    ):
        folder = snapshot_download(
            repo_id, repo_type=kind, revision=revision or None, allow_patterns=None if programs else [*files]
        )
    commit = Path(folder).name
    if not _COMMIT_PATTERN.fullmatch(commit):
        raise ConfigError(
            f"{key}={repo}: the hub returned '{commit}', which is not a Git commit id. Check HF_ENDPOINT."
        )
    return f"{repo_id}@{commit}"


@contextmanager
def convert_hub_errors(prefix: str, suffix: str) -> Iterator[None]:
    """Convert errors of `huggingface_hub` in the block to a ConfigError.

    The message consists of `prefix`, the reason and `suffix`.

    Raises:
        ConfigError: the block raised an error of the hub or of the network.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    http_error = HfHubHTTPError.__bases__[0]
    """Base class of errors of the HTTP library; the library differs between versions of `huggingface_hub`."""
    try:
        yield
    except HfHubHTTPError as error:
        code = error.response.status_code
        denied_reason = "denies access or has no such repository or revision (log in: `hf auth login`, or HF_TOKEN)"
        reason = denied_reason if code in (401, 403, 404) else f"answered {code}"
        cause = error
    except LocalEntryNotFoundError as error:
        reason, cause = (
            f"cannot be reached ({_describe_error(error.__cause__ or error)}) and the local cache is incomplete",
            error,
        )
    except (http_error, OSError, ValueError, RuntimeError) as error:  # type: ignore[misc]
        reason, cause = f"cannot be used ({_describe_error(error)})", error
    else:
        return
    raise ConfigError(f"{prefix} the hub at {constants.ENDPOINT} {reason}. {suffix}") from cause


def _describe_error(error: BaseException) -> str:
    return one_line(error).rstrip(".") or type(error).__name__
