"""Small files that the checkpoint folders of several policies have. No torch."""

import json
from collections.abc import Iterator
from pathlib import Path

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
WEIGHTS_FILE = "model.safetensors"
STATISTICS_FILE = "dataset_statistics.json"
"""Statistics of the training data; the public OpenVLA-OFT layout has it, and `embodyrl sft` writes it."""
RANDOM_INIT_KEY = "embodyrl_init"
"""config.json of a folder without weights says {"embodyrl_init": "random"}."""


def starts_random(folder: Path) -> bool:
    """Whether the folder asks for random initial weights instead of holding some."""
    try:
        return json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")).get(RANDOM_INIT_KEY) == "random"
    except (OSError, ValueError, AttributeError):
        return False


def saved_config(config: bytes) -> bytes:
    """A config.json to be written beside weights: losing them must be an error, so nothing asks for random ones."""
    content = json.loads(config)
    return config if content.pop(RANDOM_INIT_KEY, None) is None else (json.dumps(content, indent=2) + "\n").encode()


def lacking(folder: Path, *, tokenizer: str, adapted: bool) -> Iterator[str]:
    """Yield problems of a folder whose config.json is fine: what else `model.path` wants, and adapters on nothing.

    Args:
        folder: the checkpoint.
        tokenizer: where the tokenizer comes from, the end of a sentence.
        adapted: adapters are to be trained.
    """
    if not (folder / TOKENIZER_FILE).exists():
        yield f"model.path: {folder} has no {TOKENIZER_FILE}{tokenizer}"
    if not starts_random(folder):
        if not any(folder.glob("model*.safetensors*")):
            yield f"model.path: {folder} holds no model*.safetensors; fetch the weights too."
    elif adapted:
        yield (
            f"model.is_lora=true: {folder} has no trained weights, and adapters on random ones cannot learn; set "
            "model.is_lora=false, or model.path to a trained checkpoint."
        )
