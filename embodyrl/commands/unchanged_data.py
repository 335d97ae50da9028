"""Comparison of a config with the saved config of an earlier run."""

from collections.abc import Iterable
from pathlib import Path

import yaml

from embodyrl.config.compose import flatten
from embodyrl.config.settings import is_key_or_subkey
from embodyrl.errors import ConfigError
from embodyrl.plan.keys import DELETED_KEYS
from embodyrl.plan.saved import dump_config, read_saved
from embodyrl.plan.schema import Config


def check_unchanged(
    cfg: Config, run: Path, *, keys: Iterable[str], exempt: Iterable[str] = (), alternative: str = "run folder"
) -> None:
    """Raise an error if the saved config differs in one of `keys` or their subkeys, except `exempt` and its subkeys.

    Raises:
        ConfigError: values differ; the message lists the run's values and suggests another `alternative`.
    """
    if not (file := run / "config.yaml").is_file():
        return
    keys, exempt = list(keys), list(exempt)
    old = {key: value for key, value in read_saved(file).items() if key not in DELETED_KEYS}
    new = flatten(yaml.safe_load(dump_config(cfg)))
    names = [name for name in {**old, **new} if is_key_or_subkey(name, keys) and not is_key_or_subkey(name, exempt)]
    if differences := [f"{name}={old.get(name)}" for name in names if old.get(name) != new.get(name)]:
        raise ConfigError(
            f"{run} was created with {', '.join(differences)} and cannot resume with other values. Use the same "
            f"settings, or choose another {alternative}."
        )
