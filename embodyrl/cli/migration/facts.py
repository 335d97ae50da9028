"""What decides a result, in the source's terms and in ours, worked out apart from the tables of keys."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodyrl.cli.migration.expressions import evaluate
from embodyrl.cli.migration.tables import read
from embodyrl.cli.migration.translate import Migration
from embodyrl.config.settings import leaves, spell


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One line of the comparison."""

    what: str
    theirs: Any
    ours: Any

    @property
    def is_same(self) -> bool | None:
        """Whether both say the same; None where the source leaves it open."""
        return None if self.theirs is None or self.ours is None else _same(self.theirs, self.ours)

    def line(self) -> str:
        """Text for the screen."""
        mark = {True: "", False: "  differs", None: "  not said there"}[self.is_same]
        return f"  {self.what:<22} {_shown(self.theirs):<24} {_shown(self.ours)}{mark}"


def side_by_side(result: Migration) -> list[Fact]:
    """Compare what the source's keys mean with what the migrated config means."""
    theirs = _worked_out(result.system.facts, result.values)
    ours = _worked_out(read("ours.yaml"), dict(leaves(result.config)))
    rows = [Fact(what=what.replace("_", " "), theirs=theirs.get(what), ours=value) for what, value in ours.items()]
    return [row for row in rows if not (row.theirs in (None, "off") and row.ours in (None, "off"))]


def _worked_out(facts: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate facts in their order; each may use those before it. `words` are their terms for ours."""
    found: dict[str, Any] = {}
    for what, rule in facts.items():
        text, words = (rule["is"], rule["words"]) if isinstance(rule, dict) else (str(rule), {})
        value = evaluate(text, {**values, **found})
        found[what] = words.get(value.lower(), value) if isinstance(value, str) else value
    return found


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, bool) or isinstance(b, bool) or not (isinstance(a, int | float) and isinstance(b, int | float)):
        return str(a).lower() == str(b).lower()
    return math.isclose(a, b, rel_tol=1e-6)


def _shown(value: Any) -> str:
    return "?" if value is None else f"{value:g}" if isinstance(value, float) else spell(value)
