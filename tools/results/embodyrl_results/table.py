"""Table of results: recipes (recipes.toml), and stored result cards (cards/)."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import embodyrl
from embodyrl.errors import ConfigError
from embodyrl.files import read_json
from embodyrl.registry import closest
from embodyrl.reports.seeds import mean_interval

Card = dict[str, Any]
RECIPES, CARDS = "recipes.toml", "cards"
BEFORE, AFTER = 0, -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A training command that produces one row of the table."""

    name: str
    title: str
    command: str
    """Command and overrides, without `embodyrl`, seed and output folder.

    `{out}` is replaced by the folder of the runs, and `{seed}` by the seed. The last evaluation uses the test
    states."""
    prepare: tuple[str, ...] = ()
    """Commands that create data sets and initial checkpoints; a command with `{seed}` runs once per seed."""
    seeds: tuple[int, ...] = (0,)
    page: str = ""
    """Path of a page with details, relative to the folder of the table."""
    video: str = ""
    claimed: str = ""
    """Text of an earlier result without a result card."""

    def arguments(self, seed: int, out: Path) -> list[str]:
        """Return the arguments of `embodyrl` for one seed; `{out}` is replaced by `out`."""
        return [*_fill_placeholders(self.command, seed, out), f"seed={seed}"]

    def preparations(self, seed: int, out: Path) -> list[tuple[str, list[str]]]:
        """Return the run name and the arguments of `embodyrl` for each preparation of one seed."""
        preparations: list[tuple[str, list[str]]] = []
        for number, command in enumerate(self.prepare, 1):
            suffix = f"_seed{seed}" if "{seed}" in command else ""
            preparations.append((f"{self.name}_prepare{number}{suffix}", _fill_placeholders(command, seed, out)))
        return preparations

    def run_name(self, seed: int) -> str:
        """Return the name of the run, which is also the name of its card."""
        return f"{self.name}_seed{seed}"


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the table: a recipe, an imported result or a control, with one card per seed."""

    name: str
    cards: tuple[Card, ...]
    recipe: Recipe | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Table of results: a folder with recipes and stored result cards."""

    folder: Path
    recipes: dict[str, Recipe]

    @property
    def run_names(self) -> set[str]:
        """Names of the runs of all recipes, which are also the names of their cards."""
        return {recipe.run_name(seed) for recipe in self.recipes.values() for seed in recipe.seeds}

    def select(self, names: Sequence[str], *, all_of_them: bool) -> list[Recipe]:
        """Return the recipes with the given names; without names, all recipes.

        Raises:
            ConfigError: a name is unknown, or there are no names and `all_of_them` is false.
        """
        for name in names:
            if name not in self.recipes:
                hint = closest(name, self.recipes)
                raise ConfigError(
                    f"Unknown recipe '{name}'.{hint} {self.folder / RECIPES} has {', '.join(self.recipes)}."
                )
        if not names and not all_of_them:
            raise ConfigError(f"Pass the name of a recipe, or --all. Recipes: {', '.join(self.recipes)}.")
        return [self.recipes[name] for name in names] or [*self.recipes.values()]

    def stored(self, recipe: Recipe) -> tuple[Card, ...]:
        """Return the stored result cards of a recipe, one per seed."""
        paths = [self.folder / CARDS / f"{recipe.run_name(seed)}.json" for seed in recipe.seeds]
        return tuple(read_card(path) for path in paths if path.is_file())

    def rows(self) -> list[Row]:
        """Return all rows: first the recipes in the order of the file, then the other cards by name."""
        rows = [Row(recipe.name, self.stored(recipe), recipe) for recipe in self.recipes.values()]
        cards, run_names = sorted((self.folder / CARDS).glob("*.json")), self.run_names
        others = [path for path in cards if path.stem not in run_names]
        return rows + [Row(path.stem, (read_card(path),)) for path in others]


def open_table(folder: Path | None) -> Table:
    """Read the table in a folder; None: the table of the source checkout.

    Raises:
        ConfigError: there is no table, or its recipes are malformed.
    """
    folder = folder or Path(embodyrl.__file__).parents[1] / "docs" / "results"
    path = folder / RECIPES
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist. Use a source checkout, or pass a folder with {RECIPES}: --table DIR."
        )
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        recipes = {name: _parse_recipe(name, entry) for name, entry in raw.items()}
    except (tomllib.TOMLDecodeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error}. The keys of a recipe are title, command, prepare, seeds, page, video, claimed."
        ) from error
    return Table(folder, recipes)


def _fill_placeholders(command: str, seed: int, out: Path) -> list[str]:
    return [word.replace("{out}", str(out)).replace("{seed}", str(seed)) for word in shlex.split(command)]


def _parse_recipe(name: str, entry: dict[str, Any]) -> Recipe:
    lists = {key: tuple(entry.get(key, default)) for key, default in (("seeds", (0,)), ("prepare", ()))}
    recipe = Recipe(**{**entry, **lists, "name": name})
    if not recipe.command.startswith("train ") or not recipe.seeds:
        raise ValueError(f"recipe {name}: `command` must begin with 'train', and `seeds` must not be empty")
    return recipe


def read_card(path: Path) -> Card:
    """Read a result card.

    Raises:
        ConfigError: the file is not a result card with an evaluation.
    """
    try:
        card = read_json(path)
        rows = [figures["rows"][0] for figures in card["figures"]]
        is_valid = bool(rows) and all(
            {"kind", "value", "low", "high", "episodes", "text"} <= row.keys() for row in rows
        )
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        raise ConfigError(f"{path} is not a result card with an evaluation. Create a card with `embodyrl card RUN`.")
    return card


def score_row(card: Card, end: int) -> dict[str, Any]:
    """Return the overall score of the first (`BEFORE`) or the last evaluation (`AFTER`)."""
    return card["figures"][end]["rows"][0]


def score_text(cards: Sequence[Card], end: int) -> str:
    """Return the mean score with its 95 % interval as text.

    The interval is over seeds, or, for a single card, over initial states. Equal returns have no interval.
    """
    if not cards or (end == BEFORE and any(len(card["figures"]) < 2 for card in cards)):
        return "-"
    rows = [score_row(card, end) for card in cards]
    if len(rows) == 1 or (end == BEFORE and len({row["text"] for row in rows}) == 1):  # one checkpoint for all seeds
        return rows[0]["text"]
    values = [row["value"] for row in rows]
    intervals = [(row["low"], row["high"]) for row in rows if row["low"] is not None]
    mean, low, high = mean_interval(values, intervals)
    if rows[0]["kind"] != "success":
        bounds = f" [{low:.4g}, {high:.4g}]" if low < high else ""
        return f"{mean:.4g}{bounds} ({', '.join(f'{value:.4g}' for value in values)})"
    seeds_text = ", ".join(f"{100 * value:.1f}" for value in values)
    return f"{100 * mean:.1f} % [{100 * max(low, 0):.1f}, {100 * min(high, 1):.1f}] ({seeds_text})"
