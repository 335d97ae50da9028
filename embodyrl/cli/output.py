"""Output of commands as text lines or JSON."""

import argparse
from collections import Counter
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

from embodyrl.errors import clean_text, mask_json
from embodyrl.files import json_text

_FAMILY_SIZE = 10
"""Minimum number of variants of a family that is listed as one name, such as libero_pro_*."""


def show_result(args: argparse.Namespace, data: Any, lines: Iterable[str]) -> None:
    """Print `data` as JSON if `--json` is set, otherwise print `lines`."""
    print(mask_json(json_text(data)) if args.json else clean_text("\n".join(lines)) + "\n", end="")


def group_variants(group: str, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the options of a config group, with all options of a large family of variants under one name.

    Members of a family have the same title in `variants.yaml`, for example libero_pro_* with the title LIBERO-PRO.
    """
    from embodyrl.config.compose import variants

    titles = {name: text.partition(":")[0] for name, (_, text, _) in variants(group).items()}
    counts = Counter(titles.values())
    families: dict[str, list[str]] = {}
    for name in names:
        title = titles.get(name)
        if title is not None and counts[title] >= _FAMILY_SIZE:
            members = [member for member, other in titles.items() if other == title]
            parts = zip(*(member.split("_") for member in members), strict=False)
            shared = (column[0] for column in takewhile(lambda column: len({*column}) == 1, parts))
            families.setdefault(f"{'_'.join(shared)}_*", []).append(name)
        else:
            families[name] = [name]
    return families


def get_help(group: str, option: str, file: Path) -> str:
    """Return the description of a group option: the first comment of its file other than `# @package ...`."""
    from embodyrl.config.compose import variants

    if option in variants(group):
        return variants(group)[option][1]
    comments = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    texts = (line.lstrip("# ").strip() for line in comments)
    return next((text for text in texts if text and not text.startswith("@")), "")
