"""Make the tokenizer of assets/openvla_oft_tiny from the task texts of the five LIBERO suites and some table-top words.

Usage: python scripts/make_tiny_tokenizer.py OUT_FOLDER    (needs the `libero` extra)

The layout is that of Llama-2's tokenizer.json: ids 0-2 are <unk> <s> </s>, 3-258 the bytes, then learned pieces with
"\u2581" for the start of a word, then pieces that no text reaches (the last 256 are the action ids), then <PAD>.
"""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path
from typing import Any

from libero.libero import benchmark
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
NUM_ACTION_IDS = 256
VOCAB_SIZE = 960
"""Vd: the embedding table adds `pad_to_multiple_of` = 64 rows to 1024."""
WORD_START = "▁"
SPECIAL = ("<unk>", "<s>", "</s>")
HEAD = "In: What action should the robot take to {instruction}?"
TAIL = "Out:"
MORE_WORDS = (
    "red green blue yellow orange purple pink brown black white gray push pull pick place put move lift stack slide "
    "open close block cube ball square circle target zone line disk onto into over under beside from at of with up down"
)


def task_texts() -> list[str]:
    """Return the instructions of all tasks, lower-case, in suite order."""
    suites = benchmark.get_benchmark_dict()
    texts = []
    for name in SUITES:
        suite = suites[name]()
        texts += [suite.get_task(i).language.lower() for i in range(suite.n_tasks)]
    return texts


def learn_pieces(texts: list[str], size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Learn `size` byte-pair pieces within words; returns pieces in id order and their merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", WORD_START)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{WORD_START}?[A-Za-z]+|[^A-Za-z]"), "isolated")
    alphabet = [*string.ascii_letters, *string.digits, *".,:;?!'-_()", WORD_START]
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    # The first line gets a word start from the normalizer; "Out:" follows a newline and gets none.
    lines = [f"{WORD_START}{HEAD.format(instruction=text)}" for text in [*texts, MORE_WORDS]] + [TAIL] * len(texts)
    tokenizer.train_from_iterator(lines, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].get), [(left, right) for left, right in merges]


def llama_layout(pieces: list[str], merges: list[tuple[str, str]]) -> dict[str, Any]:
    """Write learned pieces into a tokenizer.json with the layout of Llama-2."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokens += [f"<rare_{i:03d}>" for i in range(VOCAB_SIZE - len(tokens))]
    assert len(tokens) == VOCAB_SIZE, len(tokens)
    assert all(t.startswith("<rare_") for t in tokens[-NUM_ACTION_IDS:]), "learned pieces reach into the action ids"
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [*enumerate(SPECIAL), (VOCAB_SIZE, "<PAD>")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **flags} for number, token in added],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": WORD_START},
                {"type": "Replace", "pattern": {"String": " "}, "content": WORD_START},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": WORD_START}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [" ".join(merge) for merge in merges],
        },
    }


def main() -> None:
    """Write tokenizer.json into the folder on the command line."""
    folder = Path(sys.argv[1])
    free = VOCAB_SIZE - len(SPECIAL) - 256 - NUM_ACTION_IDS
    content = llama_layout(*learn_pieces(task_texts(), free))
    text = json.dumps(content, ensure_ascii=False, indent=1)
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
