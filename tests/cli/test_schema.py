"""The JSON schema of a config contains every key with its documentation."""

from embodyrl.cli.discover.schema import json_schema
from embodyrl.plan.config import load_config


def test_schema_contains_keys_of_estimator_and_loss_with_documentation() -> None:
    schema = load_config("train", []).schema
    found = json_schema(schema)
    assert found["description"] == "Config of `embodyrl train`."
    for name, key in schema.keys.items():
        *sections, last = name.split(".")
        at = found
        for section in sections:
            at = found["$defs"][at["properties"][section]["$ref"].rpartition("/")[2]]
        entry = at["properties"][last]
        assert " ".join(entry.get("description", "").split()) == key.doc, name
    assert {"clip_ratio_low", "filter_rewards"} <= found["$defs"][schema.sections["algorithm"].__name__][
        "properties"
    ].keys()
