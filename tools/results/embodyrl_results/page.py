"""Rendering of the table of results as Markdown or text; all values are from result cards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from embodyrl_results.table import AFTER, BEFORE, CARDS, Card, Row, Table, score_text

PAGE, OUT = "index.md", "runs/results"
_INTRO = """# Table of results

`embodyrl-results page` generates this page from `recipes.toml` and the cards in `cards/`. Every row is one recipe.

- Before, after: success (or return) in the first and the last evaluation of the training command, on test states that
  training does not use. Several seeds: mean with the 95 % interval of Student's t over seeds, then each seed. One seed:
  Wilson interval over initial states.
- CPU-seconds, wall time and memory of the largest process are listed for each seed. Both evaluations are included,
  preparations are not. Other programs share the machine.
- [Commands](#commands) also lists test states (with the number of distinct states), commit and machine.

`embodyrl-results run NAME` runs a row again, `embodyrl-results check` compares the new cards with the stored cards
([guide](../howto/results.md)). The [coverage](statistics.md) of the intervals is measured.
"""
_COLUMNS = ("recipe", "before", "after", "CPU-s", "cards")
_IMPORTED = ("result", "score", "episodes", "protocol", "source")


def page_text(table: Table) -> str:
    """Return the table of results as a Markdown page."""
    rows = table.rows()
    measured = [row for row in rows if row.recipe and row.cards]
    lines = [_INTRO, *_markdown(_COLUMNS, map(_cells, measured))]
    if claimed := [row.recipe for row in rows if row.recipe and not row.cards]:
        lines += ["", "## Without a card", "", "Not run, or the run folders no longer exist.", ""]
        cells = (
            (_linked(one.title, one.page), one.claimed or "not run", f"[{one.name}](#{one.name})") for one in claimed
        )
        lines += _markdown(("recipe", "claimed", "command"), cells)
    if imported := [row for row in rows if row.recipe is None and "imported" in row.cards[0]]:
        lines += ["", "## Results of other tools", "", *_markdown(_IMPORTED, map(_imported, imported))]
    if others := [row for row in rows if row.recipe is None and "imported" not in row.cards[0]]:
        lines += ["", "## Other cards", "", "Controls and single runs, named on the pages of results.", ""]
        cells = (
            (f"[{r.name}]({CARDS}/{r.name}.md)", *(score_text(r.cards, end) for end in (BEFORE, AFTER))) for r in others
        )
        lines += _markdown(("card", "before", "after"), cells)
    lines += ["", "## Commands", ""]
    for row in rows:
        lines += _section(row) if row.recipe else ()
    return "\n".join(lines)


def summary(table: Table) -> list[str]:
    """Return the table of results as lines of text for a terminal."""
    found = [("recipe", "before", "after", "cards")]
    for row in table.rows():
        wanted = len(row.recipe.seeds) if row.recipe else 1
        ends = score_text(row.cards, BEFORE), score_text(row.cards, AFTER)
        found.append((row.name, *ends, f"{len(row.cards)}/{wanted}"))
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in found]


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for cells in rows:
        yield f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |"


def _cells(row: Row) -> tuple[str, ...]:
    recipe, cards = row.recipe, row.cards
    assert recipe is not None
    links = [f"[{card['seeds']['run']}]({CARDS}/{recipe.run_name(card['seeds']['run'])}.md)" for card in cards]
    links += [f"[video]({recipe.video})"] if recipe.video else []
    return (
        f"{_linked(recipe.title, recipe.page)}<br>[command](#{recipe.name})",
        score_text(cards, BEFORE),
        score_text(cards, AFTER),
        _cost(cards, "cpu_hours", 3600),
        ", ".join(links),
    )


def _section(row: Row) -> Iterator[str]:
    """Yield the lines with commands, machine and costs of a recipe."""
    recipe, cards = row.recipe, row.cards
    assert recipe is not None
    yield from (f"### {recipe.name}", "", f"{recipe.title}, `seed={','.join(map(str, recipe.seeds))}`", "")
    commands = enumerate((*recipe.prepare, recipe.command), 1)
    yield from (f"{number}. `embodyrl {command}`".replace("{out}", OUT) for number, command in commands)
    if cards:
        facts = (
            f"Test states {_each(cards, _states)}",
            f"commit {_each(cards, lambda card: (card['commit'] or 'not known')[:8])}",
            f"wall time {_cost(cards, 'wall_hours', 3600)} s",
            f"memory {_cost(cards, 'largest_process_mib', 1)} MiB",
            _each(
                cards, lambda card: f"{card['machine'].get('cores', '?')} x {card['machine'].get('processor', 'CPU')}"
            ),
        )
        yield from ("", "; ".join(facts))
    yield ""


def _imported(row: Row) -> tuple[str, ...]:
    card = row.cards[0]
    score, dropped = card["figures"][AFTER]["rows"][0], card.get("dropped_episodes", 0)
    episodes = str(score["episodes"]) + (f", {dropped} with errors excluded" if dropped else "")
    return row.name, score["text"], episodes, card["protocol"]["name"], card["imported"]


def _linked(text: str, page: str) -> str:
    return f"[{text}]({page})" if page else text


def _each(cards: Sequence[Card], value: Callable[[Card], str]) -> str:
    """Return the distinct values of the cards, joined by commas."""
    return ", ".join(dict.fromkeys(map(value, cards)))


def _states(card: Card) -> str:
    states = card["states"]
    span = states.get("evaluation", "all")
    named = f"{span[0]} to {span[1]}" if isinstance(span, list) else str(span)
    return f"{named} ({states.get('evaluated', '?')})"


def _cost(cards: Sequence[Card], name: str, scale: float) -> str:
    found = [card["costs"].get(name) for card in cards]
    return ", ".join("-" if value is None else f"{scale * value:.0f}" for value in found)
