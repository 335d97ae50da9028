"""JSON schema of a config, with the documentation of every key."""

from collections.abc import Iterator
from typing import Any

from pydantic.json_schema import models_json_schema

from embodyrl.config.settings import Settings, get_doc
from embodyrl.plan.schema import Schema, TopSettings


def json_schema(schema: Schema) -> dict[str, Any]:
    """Return the JSON schema of a config with the documentation of every key."""
    kinds = [TopSettings, *schema.sections.values(), schema.loss]
    refs, found = models_json_schema([(kind, "validation") for kind in kinds])
    definitions = found["$defs"]
    for kind in (part for whole in kinds for part in (whole, *_parts(whole))):
        for key, entry in definitions[kind.__name__].get("properties", {}).items():
            if doc := get_doc(kind, key):
                entry["description"] = doc
    top = definitions.pop(TopSettings.__name__)
    own = definitions.pop(schema.loss.__name__).get("properties", {})
    definitions.pop(Settings.__name__, None)  # the default of the loss
    if "algorithm" in schema.sections:  # the keys of the loss are written next to the keys of the estimator
        definitions[schema.sections["algorithm"].__name__]["properties"] |= own
    sections = {name: refs[kind, "validation"] for name, kind in schema.sections.items()}
    used = {key: entry for key, entry in top["properties"].items() if key in schema.keys}
    described = {"title": "Config", "description": f"Config of `embodyrl {schema.command}`."}
    return top | described | {"properties": used | sections, "$defs": definitions}


def _parts(kind: type[Settings]) -> Iterator[type[Settings]]:
    for info in kind.model_fields.values():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Settings):
            yield info.annotation
            yield from _parts(info.annotation)
