"""Write OUTCOMES.md: the outcome of embodyrl-migrate for the recipes of the tests and for configs in FOLDERS.

PYTHONPATH=tools/migrate python tools/migrate/outcomes.py [FOLDER ...]
"""

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from embodyrl_migrate.report import compare, reasons
from embodyrl_migrate.source import read_source
from embodyrl_migrate.tables import MigrationError, format_value
from embodyrl_migrate.translate import translate

HERE = Path(__file__).parent
DATA = HERE / "tests" / "data"
SEED, SAMPLE = 0, 20
SHOWN = 3
"""Reasons shown for each config."""


class Outcome(NamedTuple):
    """Outcome of one config."""

    code: int
    system: str
    why: list[str]


def outcome(path: Path, overrides: Sequence[str] = ()) -> Outcome:
    """Translate one config without writing files."""
    try:
        source = read_source(path, overrides)
        result = translate(source)
        why = reasons(result, compare(result) if result.config is not None else [], source)
    except MigrationError as error:
        return Outcome(2, "not recognized", error.problems)
    return Outcome(2 if why else 0, f"{result.system.name} {result.layout}".strip(), why)


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [_row(*head), "|" + "---|" * len(head), *(_row(*row) for row in rows), ""]


def _short(why: Sequence[str]) -> str:
    more = f" (and {len(why) - SHOWN} more)" if len(why) > SHOWN else ""
    return " ".join(text[:160] for text in why[:SHOWN]) + more


def _configs(folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    for folder in folders:
        for path in sorted(path for end in ("yaml", "yml", "toml", "sh") for path in folder.glob(f"*.{end}")):
            yield f"{folder.name}/{path.relative_to(folder)}", path


def _sampled(name: str, recipe: dict[str, Any]) -> list[str]:
    values = "; ".join(f"{key}={format_value(value)}" for key, value in sorted(recipe["values"].items()))
    return [f"- **{name}** ({recipe['source']}), {len(recipe['values'])} values: {values}", ""]


def main(folders: Sequence[Path]) -> None:
    """Write the tables."""
    recipes: dict[str, dict[str, Any]] = yaml.safe_load((DATA / "recipes.yaml").read_text())["recipes"]
    families: dict[str, dict[str, Any]] = yaml.safe_load((DATA / "rlinf_families.yaml").read_text())
    found = {name: outcome(DATA / recipe["base"], recipe["overrides"]) for name, recipe in recipes.items()}
    by_family = {name: outcome(DATA / family["base"], family.get("overrides", ())) for name, family in families.items()}
    files = {name: outcome(path) for name, path in _configs(folders)}
    accepted = [name for name, one in found.items() if one.code == 0]
    count = Counter((one.system, one.code) for one in (*found.values(), *files.values()))
    for name, one in by_family.items():
        count[one.system + ", by family", one.code] += len(families[name]["configs"])
    lines = [
        "# Outcomes of embodyrl-migrate",
        "",
        "Written by `outcomes.py` from the recipes of the tests and the given folders: here the public cases and",
        "the configs in the packages verl 0.9.1 and cosmos-rl 0.4.7.",
        "",
        "## Totals",
        "",
    ]
    lines += _table(["system", "exit code", "configs"], [(*key, n) for key, n in sorted(count.items())])
    lines += ["## Configs that were read, as overrides of a recipe (`tests/data/recipes.yaml`)", ""]
    lines += _table(
        ["config", "system", "exit code", "reasons"], [(n, o.system, o.code, _short(o.why)) for n, o in found.items()]
    )
    lines += ["## RLinf's embodied configs by family (`tests/data/rlinf_families.yaml`)", ""]
    rows = [(n, len(families[n]["configs"]), o.code, _short(o.why)) for n, o in by_family.items()]
    lines += _table(["family", "configs", "exit code", "reasons"], rows)
    lines += ["## Files", ""]
    lines += _table(
        ["file", "system", "exit code", "reasons"], [(n, o.system, o.code, _short(o.why)) for n, o in files.items()]
    )
    sample = sorted(random.Random(SEED).sample(accepted, SAMPLE))
    lines += [f"## Sample of {SAMPLE} accepted configs (seed {SEED} of {len(accepted)})", ""]
    lines += [
        "Compared for each: these values of the experiment, worked out by hand from the source; tests compare them.",
        "",
    ]
    lines += [line for name in sample for line in _sampled(name, recipes[name])]
    (HERE / "OUTCOMES.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
