"""The JSON schema of a config contains the keys of flattened fields, with their documentation."""

from embodyrl.cli.discover.schema import json_schema
from embodyrl.config.settings import Settings


class Brush(Settings):
    """Settings of a tool."""

    width: int = 3
    """Width of the stroke."""


class Mixed(Settings):
    """A section whose tool is flattened."""

    flattened = "tool"
    base: str = "oil"
    """Base of the paint."""
    tool: Settings = Settings()


class Studio(Settings):
    """A config with the section."""

    inlined = {"mixed": Brush}
    mixed: Mixed = Mixed()


def test_schema_contains_flattened_keys_with_documentation() -> None:
    properties = json_schema(Studio)["$defs"]["Mixed"]["properties"]
    assert properties["base"]["description"] == "Base of the paint."
    assert "width" in properties
