"""Keys of a conversation about actions, whichever side of it we are on."""

from typing import Annotated, Literal

from pydantic import Field

from embodyrl.config.settings import Says, Seconds, Settings
from embodyrl.policies.settings import ModelSettings


class ConversationSettings(Settings):
    """How observations are named on the wire."""

    protocol: Literal["openpi", "vla_eval"] = "openpi"
    """openpi: observation in, chunk of actions out; vla_eval: messages about episodes, one action out at a time."""
    image_names: list[str] | None = None
    """Names of the camera images, in the order of the policy's; default: the protocol's for LIBERO."""
    state_name: str | None = None
    """Name of the state; default: the protocol's."""
    prompt_name: str | None = None
    """Name of the instruction; default: the protocol's."""


class RemoteSettings(ModelSettings, ConversationSettings):
    """Where the policy is and what it understands."""

    url: Annotated[str, Field(pattern=r"^wss?://[^\s/]+(/\S*)?$"), Says("ws://HOST:PORT or wss://HOST:PORT")] | None = (
        None
    )
    """Where it listens, for example ws://127.0.0.1:8000."""
    connect_timeout_s: Seconds = 60.0
    """How long to wait until somebody listens there."""
    answer_timeout_s: Seconds = 120.0
    """How long an answer may take."""
