"""The README has ten sections of at most 800 words, and its results equal recipes and result cards."""

from __future__ import annotations

import re
from typing import Any

import pytest
from embodyrl_results.table import AFTER, BEFORE, Card, Recipe, open_table
from processes import SOURCE

README = (SOURCE / "README.md").read_text(encoding="utf-8")
TABLE = open_table(SOURCE / "docs" / "results")
CORES = 2


def rows_below(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its first two lines."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return lines[2:]


def percent(cards: tuple[Card, ...], step: int) -> str:
    """Return the success rates of all seeds in percent; equal rates are listed once."""
    rates = [f"{100 * card['figures'][step]['rows'][0]['value']:.0f}" for card in cards]
    return rates[0] if len(set(rates)) == 1 else ", ".join(rates)


def minutes(cards: tuple[Card, ...]) -> str:
    """Return the range of CPU minutes of all seeds."""
    ends = [f"{60 * end(card['costs']['cpu_hours'] for card in cards):.0f}" for end in (min, max)]
    return " to ".join(dict.fromkeys(ends))


RESULTS = rows_below("Results on two CPU cores")


@pytest.mark.parametrize("cells", RESULTS, ids=lambda cells: cells[0])
def test_readme_result_equals_recipe_and_cards(cells: list[str]) -> None:
    (name,) = re.findall(r"\]\(docs/results/index\.md#(\w+)\)", cells[0])
    recipe: Recipe = TABLE.recipes[name]
    cards = TABLE.stored(recipe)
    assert not recipe.prepare, "a row of the README needs one command only"
    expected = [f"`embodyrl {recipe.command}`", percent(cards, BEFORE), percent(cards, AFTER), minutes(cards)]
    assert cells[1:] == expected
    assert max(int(card["machine"]["cores"]) for card in cards) <= CORES
    for card in cards:
        typed = card["command"].replace("'", "").split()
        assert [word for word in recipe.command.split() if word not in typed] == []


def test_readme_has_five_results_and_names_their_seeds() -> None:
    assert len(RESULTS) == 5
    seeds: dict[str, Any] = {}
    for cells in RESULTS:
        recipe = TABLE.recipes[cells[0].rpartition("#")[2].rstrip(")")]
        seeds[recipe.name] = [card["seeds"]["run"] for card in TABLE.stored(recipe)]
    assert seeds.pop("smollm2_sums") == [1]
    assert seeds.pop("libero_laptop") == [15, 16, 17]
    assert all(numbers in ([0, 1, 2], [0]) for numbers in seeds.values())


def test_every_supported_part_links_to_a_guide() -> None:
    cells = [cell for _, *row in rows_below("Supported parts") for cell in row]
    parts = [part for cell in cells for part in re.sub(r"\[[^]]*\]\([^)]*\)", "LINK", cell).split(", ")]
    assert [part for part in parts if not part.startswith("LINK")] == []


def test_readme_has_at_most_800_words() -> None:
    assert len(README.split()) <= 800
