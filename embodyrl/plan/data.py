"""Checks and derived values of the config section `data`."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from embodyrl.config.paths import resolve_asset
from embodyrl.data.settings import DemonstrationSettings
from embodyrl.errors import EmbodyError
from embodyrl.plan.schema import Config
from embodyrl.text.settings import PairSettings, RowSettings


def data_problems(cfg: Config) -> Iterator[str]:
    """Yield an error if `data.path` does not contain the type of data that the SFT objective needs."""
    objective = cfg.objective
    if not cfg.has("objective") or objective.name in ("imitation", "dpo"):
        return
    expected_class = PairSettings if objective.needs_text_pairs else DemonstrationSettings
    if not isinstance(cfg.data, expected_class) and cfg.data.path:
        expected = "rows of text with two answers" if objective.needs_text_pairs else "episodes that `collect` wrote"
        yield f"objective.name={objective.name} needs {expected}; data.path={cfg.data.path} contains other data."


def derive_from_data(cfg: Config) -> Mapping[str, Any]:
    """Return the derived config keys.

    SFT on text uses one action per chunk, because a reply is one action. SFT on demonstrations saves the statistics
    under the name of the data, which commands with `ckpt=` then use.
    """
    if isinstance(cfg.data, RowSettings) and not cfg.reads_rows:
        return {"model.num_action_chunks": 1}
    if cfg.command != "sft" or not isinstance(cfg.data, DemonstrationSettings) or cfg.objective.name == "dpo":
        return {}
    if "unnorm_key" not in type(cfg.model).model_fields:
        return {}
    # Imported only if needed: pyarrow takes long.
    from embodyrl.data.cards import read_card

    key = None  # null: the key of the statistics is that of the environment
    with suppress(EmbodyError):  # `sft` reports missing and damaged data
        env = read_card(resolve_asset(str(cfg.data.path)), cfg.data).env
        key = None if env.benchmark.unnorm_key else env.name
    return {"model.unnorm_key": key}
