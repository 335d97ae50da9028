"""Keys of a conversation about actions, whichever side of it we are on."""

from typing import Annotated, Literal

from pydantic import Field

from embodyrl.config.sections import of_commands
from embodyrl.config.settings import Count, Must, Seconds, Settings
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

    url: Annotated[str, Field(pattern=r"^wss?://[^\s/]+(/\S*)?$"), Must("ws://HOST:PORT or wss://HOST:PORT")] | None = (
        None
    )
    """Where it listens, for example ws://127.0.0.1:8000."""
    connect_timeout_s: Seconds = 60.0
    """How long to wait until somebody listens there."""
    answer_timeout_s: Seconds = 120.0
    """How long an answer may take."""


class ServeSettings(ConversationSettings):
    """Where a policy is served, and to whom."""

    host: Annotated[str, Field(pattern=r"^[\w.:-]+$"), Must("an address")] = "127.0.0.1"
    """Address to listen at: this machine only; 0.0.0.0 lets everyone in who reaches it, there is no password."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen at; 0: any free one."""
    answer_timeout_s: Seconds = 120.0
    """How long the policy may take for one chunk before the client gets an error."""
    idle_timeout_s: Seconds = 3600.0
    """How long a client may say nothing, or not read its answer, before its connection is closed."""
    max_message_mib: Count = 64
    """Largest message of a client, MiB."""
    max_clients: Count = 64
    """Clients that may be connected at a time."""


SECTION = of_commands(ServeSettings, "serve")
