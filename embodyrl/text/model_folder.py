"""Files of a model folder, possibly from an untrusted source: weights, tokenizer, safe loading with transformers."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodyrl.errors import CheckpointError, format_reason
from embodyrl.files import inside, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INDEX_FILE = "model.safetensors.index.json"
SAFE_OPTIONS: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
"""Arguments of each `from_pretrained` of transformers."""
_REJECTED_FIELDS = ("auto_map", "transformers_weights")
"""Fields of config.json that name programs, and weight files other than those of `list_weight_files`."""


def list_weight_files(folder: Path, files: str = "model*.safetensors") -> list[Path]:
    """Return the weight files in the index of a folder; without an index, return all files that match `files`.

    Raises:
        CheckpointError: the index is malformed or names a missing file, or the folder contains a pipe or device.
    """
    index = folder / INDEX_FILE
    # Opening a pipe would block.
    if other := [path for path in folder.glob("*") if path.exists() and not path.is_file() and not path.is_dir()]:
        raise CheckpointError(f"{other[0]} is not a regular file. Delete it.")
    try:
        # The folder may also contain old files, which are not in the index.
        paths = [inside(folder, name) for name in sorted(set(read_json(index)["weight_map"].values()))]
    except FileNotFoundError:
        return sorted(folder.glob(files))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} cannot be read ({format_reason(error)}); download the file again.") from error
    if missing := [path.name for path in paths if not path.is_file()]:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(paths)} weight files, such as {missing[0]}; the download or copy "
            "is incomplete; download the missing files."
        )
    return paths


def find_missing_weights(folder: Path, files: str = "*.safetensors") -> str | None:
    """Return an error if no file of a folder matches the pattern `files`, or if files of its index are missing."""
    try:
        paths = list_weight_files(folder, files)
    except CheckpointError as error:
        return str(error)
    return None if paths else f"{folder} contains no {files}; download the weights."


def read_tokenizer(file: Path, fix: str) -> "Tokenizer":
    """Read `tokenizer.json` with the package `tokenizers`, without stored padding and truncation.

    Raises:
        CheckpointError: the file is missing or damaged; the message ends with the sentence `fix`.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises bare Exception
        raise CheckpointError(f"{file} cannot be read: {error}. {fix}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def load_safely(folder: Path) -> Iterator[None]:
    """Check a model folder that transformers loads in the block, and prevent prompts for permission to run programs.

    transformers ignores `trust_remote_code=False` for parts of some models, and prompts on the terminal for permission
    to run their programs. Without a standard input, it raises a ValueError instead.

    Raises:
        CheckpointError: the folder contains no full model, names files outside, or its processor loads another model.
        OSError: a file cannot be read.
        ValueError: a file is malformed.
    """
    if not (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        # The library would search its hub cache for the folder, or for the adapter's base model.
        raise CheckpointError(
            f"{folder} does not contain a full model. Use the folder of a full model, and set an adapter with "
            "model.lora.path."
        )
    list_weight_files(folder)
    processor = folder / "processor_config.json"
    parts = read_json(processor) if processor.is_file() else {}
    if "audio_tokenizer" in parts or (folder / "audio_tokenizer_config.json").exists():
        raise CheckpointError(f"{folder}: the audio tokenizer of the processor is another model. Use another model.")
    stdin, sys.stdin = sys.stdin, None
    try:
        yield
    finally:
        sys.stdin = stdin


def read_config(folder: Path) -> Any:
    """Return a model's config without fields that name programs or other weight files."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, **SAFE_OPTIONS)
    # `to_dict` drops the attention implementation, which may be a repository with kernels, and kernels are programs.
    return type(config).from_dict(_remove_fields(config.to_dict()))


def _remove_fields(value: Any) -> Any:
    """Return a copy of a config, without `_REJECTED_FIELDS` in it and in the configs of its parts."""
    if isinstance(value, dict):
        return {key: _remove_fields(part) for key, part in value.items() if key not in _REJECTED_FIELDS}
    return [_remove_fields(part) for part in value] if isinstance(value, list) else value
