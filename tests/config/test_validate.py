"""The rule tables fit the schema, and the defaults obey them."""

from __future__ import annotations

from embodyrl.config.keys import all_keys
from embodyrl.config.schema import Config
from embodyrl.config.validate import RULES, UNAVAILABLE, find_conflicts, find_invalid


def test_tables_name_existing_keys() -> None:
    assert set(RULES) <= set(all_keys())
    assert set(UNAVAILABLE) <= set(all_keys())


def test_defaults_are_legal() -> None:
    assert find_invalid(Config()) == []
    assert find_conflicts(Config()) == []


def test_every_number_and_free_text_is_judged() -> None:
    unjudged = {
        name
        for name, key in all_keys().items()
        if name not in RULES and name not in UNAVAILABLE and key.base in (int, float)
    }
    # These may be negative; that they are finite is checked for every number.
    assert unjudged == {"algorithm.entropy_bonus", "algorithm.reward_bias"}
