"""Rendering of the table of results as Markdown or text; all values are from result cards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from embodyrl_results.table import AFTER, BEFORE, CARDS, Card, Recipe, Row, Table, score_text

PAGE = "index.md"
_INTRO = """# Table of results

Each row is one recipe; all values come from result cards.

- The columns "before" and "after" show the success rate (or the return) in the first and last evaluation of the
  training command, on test states that training does not use. With several seeds, the cell shows the mean with its 95 %
  interval (Student's t over seeds), then each seed; with one seed, the Wilson interval over initial states.
- CPU-s is the number of CPU-seconds of each seed, with both evaluations and without preparations.
- A card lists command, test states, commit, machine, wall time and memory of one seed.

[recipes.toml](recipes.toml) contains all commands. `embodyrl-results run NAME` runs a recipe again
([guide](../howto/results.md)). See also the [coverage of the intervals](statistics.md).
"""
_COLUMNS = ("recipe", "before", "after", "CPU-s", "cards")
_IMPORTED = ("result", "score", "episodes", "protocol", "source")


def page_text(table: Table) -> str:
    """Return the table of results as a Markdown page."""
    rows = table.rows()
    measured = [row for row in rows if row.recipe and row.cards]
    lines = [_INTRO, *_format_markdown(_COLUMNS, map(_build_cells, measured))]
    if claimed := [row.recipe for row in rows if row.recipe and not row.cards]:
        lines += ["", "## Without a card", "", "Not run, or the run folders no longer exist.", ""]
        cells = ((_format_title(recipe), recipe.claimed or "not run") for recipe in claimed)
        lines += _format_markdown(("recipe", "claimed"), cells)
    if imported := [row for row in rows if row.recipe is None and "imported" in row.cards[0]]:
        lines += [
            "",
            "## Results of other tools",
            "",
            *_format_markdown(_IMPORTED, map(_build_imported_cells, imported)),
        ]
    if others := [row for row in rows if row.recipe is None and "imported" not in row.cards[0]]:
        lines += ["", "## Other cards", "", "Controls and single runs, named on the pages of results.", ""]
        cells = (
            (f"[{r.name}]({CARDS}/{r.name}.md)", *(score_text(r.cards, end) for end in (BEFORE, AFTER))) for r in others
        )
        lines += _format_markdown(("card", "before", "after"), cells)
    return "\n".join(lines) + "\n"


def summary(table: Table) -> list[str]:
    """Return the table of results as lines of text for a terminal."""
    rows = [("recipe", "before", "after", "cards")]
    for row in table.rows():
        expected = len(row.recipe.seeds) if row.recipe else 1
        ends = score_text(row.cards, BEFORE), score_text(row.cards, AFTER)
        rows.append((row.name, *ends, f"{len(row.cards)}/{expected}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in rows]


def _format_markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for cells in rows:
        yield f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |"


def _build_cells(row: Row) -> tuple[str, ...]:
    recipe, cards = row.recipe, row.cards
    assert recipe is not None
    links = [f"[{card['seeds']['run']}]({CARDS}/{recipe.run_name(card['seeds']['run'])}.md)" for card in cards]
    links += [f"[video]({recipe.video})"] if recipe.video else []
    return (
        _format_title(recipe),
        score_text(cards, BEFORE),
        score_text(cards, AFTER),
        _format_cpu_seconds(cards),
        ", ".join(links),
    )


def _build_imported_cells(row: Row) -> tuple[str, ...]:
    card = row.cards[0]
    score, dropped = card["figures"][AFTER]["rows"][0], card.get("dropped_episodes", 0)
    episodes = str(score["episodes"]) + (f", {dropped} with errors excluded" if dropped else "")
    return row.name, score["text"], episodes, card["protocol"]["name"], card["imported"]


def _format_title(recipe: Recipe) -> str:
    """Return the title of a recipe, linked to its page, and its name, the target of links to the row."""
    title = f"[{recipe.title}]({recipe.page})" if recipe.page else recipe.title
    return f'{title}<br><a id="{recipe.name}"></a>`{recipe.name}`'


def _format_cpu_seconds(cards: Sequence[Card]) -> str:
    hours = [card["costs"].get("cpu_hours") for card in cards]
    return ", ".join("-" if value is None else f"{3600 * value:.0f}" for value in hours)
