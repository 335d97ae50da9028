"""Config keys for policy servers and clients."""

from typing import Annotated, Literal

from pydantic import Field

from embodyrl.config.settings import Constraint, Count, Seconds, Settings
from embodyrl.policies.settings import ModelSettings


class WireFormatSettings(Settings):
    """Config keys for the wire format and its field names."""

    protocol: Literal["openpi", "vla_eval"] = "openpi"
    """Wire format: openpi (observation in, action chunk out) or vla_eval (episode messages, one action at a time)."""
    image_names: list[str] | None = None
    """Keys of the camera images in messages, in the policy's order; default: the protocol's keys for LIBERO."""
    state_name: str | None = None
    """Key of the state in messages; default: the key that the protocol uses."""
    prompt_name: str | None = None
    """Key of the instruction in messages; default: the key that the protocol uses."""


class RemoteSettings(ModelSettings, WireFormatSettings):
    """Config keys for the address and the wire format of a policy server."""

    url: (
        Annotated[str, Field(pattern=r"^wss?://[^\s/]+(/\S*)?$"), Constraint("ws://HOST:PORT or wss://HOST:PORT")]
        | None
    ) = None
    """Address of the server, for example ws://127.0.0.1:8000."""
    connect_timeout_s: Seconds = 60.0
    """Maximum time in seconds until the server accepts the connection."""
    answer_timeout_s: Seconds = 120.0
    """Maximum time in seconds for a reply."""


class ServeSettings(WireFormatSettings):
    """Config keys for a policy server."""

    host: Annotated[str, Field(pattern=r"^[\w.:-]+$"), Constraint("an address")] = "127.0.0.1"
    """Bind address; default: this machine only. 0.0.0.0 accepts clients from all hosts, without authentication."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port of the server; 0: any free port."""
    answer_timeout_s: Seconds = 120.0
    """Time limit in seconds for computing one chunk; after a timeout, the client receives an error."""
    idle_timeout_s: Seconds = 3600.0
    """Time in seconds without a message or with an unread reply, after which a client is disconnected."""
    max_message_mib: Count = 64
    """Maximum size of a client's message in MiB."""
    max_clients: Count = 64
    """Maximum number of connected clients."""
