"""JSON schema of a config, with the documentation of every key."""

from collections.abc import Iterator
from typing import Any

from embodyrl.config.settings import Settings, doc_of


def json_schema(kind: type[Settings]) -> dict[str, Any]:
    """Return the JSON schema of a settings class with the documentation of every key."""
    schema = kind.model_json_schema()
    parts = {"": kind, **{part.__name__: part for part in _parts(kind)}}
    for name, inlined in kind.inlined.items():
        annotation: Any = kind.model_fields[name].annotation
        section = schema["$defs"][annotation.__name__]["properties"]
        own = inlined.model_json_schema()
        section |= own.get("properties", {})
        schema["$defs"] |= own.get("$defs", {})
    for name, definition in {"": schema, **schema.get("$defs", {})}.items():
        for key, entry in definition.get("properties", {}).items():
            if name in parts and (doc := doc_of(parts[name], key)):
                entry["description"] = doc
    return schema


def _parts(kind: type[Settings]) -> Iterator[type[Settings]]:
    for info in kind.model_fields.values():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Settings):
            yield info.annotation
            yield from _parts(info.annotation)
