"""JSON schema of a config, for editors that check YAML."""

from typing import Any

from pydantic.json_schema import models_json_schema

from embodyrl.config.settings import Settings
from embodyrl.plan.schema import Schema, TopSettings


def json_schema(schema: Schema) -> dict[str, Any]:
    """Return the JSON schema of a config with the documentation of every key."""
    classes = [TopSettings, *schema.sections.values(), schema.loss]
    refs, schemas = models_json_schema([(settings_class, "validation") for settings_class in classes])
    definitions = schemas["$defs"]
    top = definitions.pop(TopSettings.__name__)
    loss_properties = definitions.pop(schema.loss.__name__).get("properties", {})
    definitions.pop(Settings.__name__, None)  # the settings class if there is no loss
    if "algorithm" in schema.sections:  # the keys of the loss are written next to the keys of the estimator
        definitions[schema.sections["algorithm"].__name__]["properties"] |= loss_properties
    sections = {name: refs[settings_class, "validation"] for name, settings_class in schema.sections.items()}
    top_properties = {key: entry for key, entry in top["properties"].items() if key in schema.keys}
    header = {"title": "Config", "description": f"Config of `embodyrl {schema.command}`."}
    return top | header | {"properties": top_properties | sections, "$defs": definitions}
