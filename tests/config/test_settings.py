"""Settings classes: keys, wording and pickling."""

import json
from enum import StrEnum
from typing import Any

import pytest
from pydantic import ValidationError, create_model

from embodyrl.config.compose import flatten
from embodyrl.config.settings import (
    Constraint,
    Count,
    CountOrAll,
    Index,
    Name,
    Path,
    Positive,
    Seconds,
    Settings,
    Share,
    Weight,
    find_key,
    format_value,
    get_keys,
    nested,
    to_builtin,
)
from embodyrl.errors import ConfigError
from embodyrl.plan.keys import all_keys

Color = StrEnum("Color", ["red", "blue"])


class Inner(Settings):
    """Nested settings."""

    depth: Count = 2
    """Depth,
    in layers."""
    width: Count = 3
    """Width of a layer."""


class Paint(Settings):
    """First part."""

    color: Color = Color.red
    """Name of the color."""
    inner: Inner = Inner()


class Brush(Settings):
    """Second part."""

    width: Positive | None = None
    """Width of the brush."""
    extra: dict[str, Any] = {}
    """Additional values."""
    layers: list[Positive] = []
    """Thickness of each."""


@pytest.mark.parametrize("name", ["hue", "inner.hue", "color.x", "inner.depth.x"])
def test_updated_rejects_names_that_are_not_keys(name: str) -> None:
    with pytest.raises(ConfigError, match=r"has no key '[\w.]+'"):
        Paint().updated({name: 5})


def test_values_are_validated_strictly() -> None:
    for text in ('{"inner": {"depth": "2"}}', '{"inner": {"depth": true}}', '{"inner": {"depth": 2.5}}', '{"x": 1}'):
        with pytest.raises(ValidationError):
            Paint.model_validate_json(text, strict=True)


def test_key_has_description_type_and_expected_value() -> None:
    keys = get_keys(Paint) | get_keys(Brush)
    assert keys["inner.depth"].doc == "Depth, in layers."
    assert keys["color"].expectation == "one of red, blue"
    assert keys["width"].expectation == "a number greater than 0 and at most 1000000000 or null"
    assert keys["width"].type_text == "float | null"
    assert keys["layers"].type_text == "list[float]"
    assert keys["layers"].expectation == "a list such as [0.1,0.9]"
    found = find_key(get_keys(Brush), "extra.a.b")
    assert found is not None
    assert found.is_mapping


def test_updated_changes_only_one_value() -> None:
    assert Paint().updated({"inner.depth": 7, "color": Color.blue}) == Paint(color=Color.blue, inner=Inner(depth=7))
    assert Paint().updated({"inner.depth": 7, "inner.width": 8}) == Paint(inner=Inner(depth=7, width=8))
    assert to_builtin(Paint()) == {"color": "red", "inner": {"depth": 2, "width": 3}}
    assert nested(flatten(to_builtin(Paint()))) == to_builtin(Paint())
    assert format_value({"a": [True, None]}) == "{a:[true,null]}"


def test_every_number_has_an_upper_bound() -> None:
    """The planner builds lists of the requested length: a typing error must not request 10**14 episodes."""
    unbounded = [
        name
        for name, key in all_keys().items()
        if key.kind in (int, float) and not any(hasattr(m, bound) for m in key.metadata for bound in ("le", "lt"))
    ]
    assert unbounded == []


@pytest.mark.parametrize(
    ("kind", "fits", "wrong"),
    [
        (Count, [1, 10**6], [0, 10**6 + 1, 1.0, True, "1"]),
        (Index, [0, 2**63 - 1], [-1, 2**63]),
        (CountOrAll, [-1, 1], [0, -2]),
        (Seconds, [1e-9], [0, -1]),
        (Positive, [1e-9, 1], [0, float("inf")]),
        (Share, [0, 1], [-1e-9, 1 + 1e-9]),
        (Weight, [0], [-1e-9]),
        (Path, ["a", "a b/c", "/"], ["", "  ", "a\0b", "a" * 256, 3]),
        (Name, ["a", "1.5"], ["", ".a", "a/b", "a b", "a" * 101]),
    ],
)
def test_bounds_of_every_value_type_are_checked(kind: Any, fits: list, wrong: list) -> None:
    one: type[Settings] = create_model("One", __base__=Settings, value=(kind, ...))
    for value in fits:
        assert one.model_validate_json(json.dumps({"value": value}), strict=True).value == value
    for value in wrong:
        with pytest.raises(ValidationError):
            one.model_validate_json(json.dumps({"value": value}), strict=True)


def test_constraint_wording_can_be_customized() -> None:
    assert any(isinstance(m, Constraint) for m in all_keys()["video"].metadata)


def test_mutable_defaults_are_not_shared() -> None:
    class Needy(Settings):
        size: Count

    class Plain(Settings):
        size: Count = 1
        more: list[int] = []

    one = Plain()
    assert one == Plain(size=1) != Plain(size=2)
    assert one.more is not Plain().more
    for wrong in (lambda: Needy(), lambda: Plain(size=0)):
        with pytest.raises(ValidationError):
            wrong()


def test_expected_values_of_a_union_without_null_do_not_include_null() -> None:
    from embodyrl.envs.settings import ControlSettings

    key = get_keys(ControlSettings)["latency_steps"]
    assert key.expectation == "a number from 0 to 1000, or [low,high] with 0 <= low <= high"
