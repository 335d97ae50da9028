"""The tables on pages of results, and the tables of costs in guides, equal the result cards that their rows name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from embodyrl_results.table import AFTER, BEFORE, Card, open_table, score_row, score_text
from processes import SOURCE

DOCS = SOURCE / "docs"
TABLE = open_table(DOCS / "results")
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")
COLUMNS = re.compile(r"before|after|CPU|success|MiB|tabletop", re.IGNORECASE)
"""Headers of columns with results; other columns describe the row."""


def tables(page: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Yield header and cells of each table row of a page."""
    header: list[str] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if header and not set(line) <= set("|- "):
            yield header, cells
        header = header or cells


def rows_with_cards() -> dict[str, tuple[list[str], list[str], tuple[Card, ...]]]:
    """Return header, cells and cards of each row that links to recipes of the table of results."""
    found = {}
    for page in (*sorted((DOCS / "results").glob("*.md")), *sorted((DOCS / "howto").glob("*.md"))):
        if page.name == "index.md":  # generated; tools/results/tests compares the page with the cards
            continue
        names: list[str] = []
        for header, cells in tables(page):
            if cells[0]:  # an empty first cell: the same recipe, another seed
                names = re.findall(r"index\.md#(\w+)\)", " ".join(cells))
            cards = tuple(card for name in names for card in TABLE.stored(TABLE.recipes[name]))
            if cards:
                found[f"{page.stem} {len(found)}: {', '.join(names)}"] = header, cells, cards
    return found


ROWS = rows_with_cards()


def numbers_of(cards: tuple[Card, ...], header: str) -> set[float]:
    """Return the numbers that a column may contain: scores with their intervals, or costs."""
    if "MiB" in header:
        return {float(card["costs"]["largest_process_mib"]) for card in cards}
    if "CPU" in header:
        seconds = [3600 * hours for card in cards if (hours := card["costs"].get("cpu_hours"))]
        return {float(round(value / (60 if "minutes" in header else 1))) for value in seconds}
    ends = [end for end, word in ((BEFORE, "before"), (AFTER, "after")) if header.startswith(word)] or [BEFORE, AFTER]
    found: set[float] = set()
    for end in ends:
        texts = [score_text(cards, end), *(score_row(card, end)["text"] for card in cards)]
        values = [float(number) for text in texts for number in NUMBER.findall(text)]
        found |= {rounded for value in values for rounded in (value, float(round(value)), round(value, 2))}
    return found


@pytest.mark.parametrize("name", ROWS)
def test_result_pages_match_the_cards(name: str) -> None:
    header, cells, cards = ROWS[name]
    checked = 0
    for title, cell in zip(header, cells, strict=True):
        text = re.sub(r"\]\([^)]*\)|\(seed \d\)|of \d+ states|of 500|of 1000|`[^`]*`", "", cell)
        if COLUMNS.search(title) and (given := [float(number) for number in NUMBER.findall(text)]):
            allowed = numbers_of(cards, title)
            assert [number for number in given if number not in allowed] == [], (title, sorted(allowed))
            checked += 1
    assert checked


def test_metaworld_task_table_matches_the_result_cards() -> None:
    counts = []
    for name in ("metaworld_mt10", "metaworld_mt10_pixels_rl"):
        (card,) = TABLE.stored(TABLE.recipes[name])
        rows = [card["figures"][end]["rows"][1:11] for end in (BEFORE, AFTER)]
        counts += [[str(round(row["value"] * row["episodes"])) for row in tasks] for tasks in rows]
    shown = [cells[1:] for _, cells in tables(DOCS / "results" / "metaworld.md")]
    assert [list(row) for row in zip(*counts, strict=True)] == shown[:10]


def test_gpu_memory_in_the_recipe_guide_matches_the_measurements() -> None:
    measured = {cells[0]: cells[4] for _, cells in tables(DOCS / "results" / "gpu.md")}
    shown = [(cells[1], cells[3]) for header, cells in tables(DOCS / "howto" / "choose_recipe.md") if "GiB" in header]
    assert [measured.get(name, "not run") for name, _ in shown] == [gib for _, gib in shown]
    assert len(shown) == 4


def test_more_than_45_result_rows_are_compared_with_cards() -> None:
    assert len(ROWS) > 45
