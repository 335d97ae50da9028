"""A small tokenizer.json in the Llama-2 layout, with the real token ids of the words in tests."""

import json
from pathlib import Path

PAD_ID = 32000
# Real ids of Llama-2 pieces; "\u2581" is the word start.
PIECES = {
    "▁In": 512, ":": 29901, "▁What": 1724, "▁action": 3158, "▁should": 881, "▁the": 278, "▁robot": 19964,
    "▁take": 2125, "▁to": 304, "▁put": 1925, "▁both": 1716, "▁alphabet": 22968, "▁soup": 22300, "▁and": 322,
    "▁tom": 6454, "ato": 1219, "▁sau": 12507, "ce": 346, "▁in": 297, "▁basket": 25972, "?": 29973, "Out": 3744,
    "▁pick": 5839, "▁up": 701, "▁black": 4628, "▁bow": 12580, "l": 29880, "▁between": 1546, "▁plate": 15284,
    "▁r": 364, "ame": 420, "kin": 9089, "▁place": 2058, "▁it": 372, "▁on": 373, "▁": 29871,
}  # fmt: skip


def write_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json; every piece is reached by merging its characters from left to right."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)} | PIECES
    spare = iter(range(30000, 31744))
    merges: list[tuple[str, str]] = []
    # Pieces that start a word merge first, so that inner pieces only see what these leave over.
    for piece in sorted(PIECES, key=lambda p: not p.startswith("▁")):
        for end in range(1, len(piece)):
            left, right = piece[:end], piece[end]
            for part in (left, right, left + right):
                if part not in vocab:
                    vocab[part] = next(spare)
            if (left, right) not in merges:
                merges.append((left, right))
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for i, t in ((0, "<unk>"), (1, "<s>"), (2, "</s>"), (PAD_ID, "<PAD>"))
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": None,
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "vocab": vocab,
                  "merges": [" ".join(m) for m in merges]},
    }  # fmt: skip
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path
