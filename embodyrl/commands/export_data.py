"""Export and upload of policies trained on demonstrations, for `embodyrl ckpt export` and `embodyrl push`."""

from pathlib import Path

from embodyrl.config.paths import resolve_asset
from embodyrl.data.cards import read_card
from embodyrl.data.checks import check_layout
from embodyrl.data.layout import INFO_PATH
from embodyrl.data.settings import DemonstrationSettings
from embodyrl.data.tables import read_info
from embodyrl.errors import ConfigError
from embodyrl.text.settings import DataSettings
from embodyrl.text.specs import ANY_TEXT
from embodyrl.types import EnvSpec


def data_environment(data: DataSettings) -> EnvSpec:
    """Return the environment spec of demonstrations; for text, a generic spec that fits all rows."""
    if isinstance(data, DemonstrationSettings):
        return read_card(resolve_asset(str(data.path)), data).env
    return ANY_TEXT


def hub_task(data: DataSettings | None) -> str:
    """Return the task category of the Hugging Face hub for a policy trained on `data`; None: trained by RL."""
    return (
        "text-generation"
        if isinstance(data, DataSettings) and not isinstance(data, DemonstrationSettings)
        else "robotics"
    )


def dataset_card(source: Path, repo: str) -> tuple[str, str] | None:
    """Return the README text and the git tag for the upload of a data set; the tag is the LeRobot layout version.

    Return None if the folder is not a data set.

    Raises:
        ConfigError: the data set is damaged.
    """
    if not (source / INFO_PATH).is_file():
        return None
    if problems := check_layout(source):
        raise ConfigError(problems)
    template = Path(__file__).with_name("data_card.md").read_text(encoding="utf-8")
    env, version = read_card(source).env.name, read_info(source)["codebase_version"]
    return template.format(name=source.name, env=env, version=version, repo=repo), version
