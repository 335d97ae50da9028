"""Config keys for environments of OpenEnv servers."""

from typing import Annotated, Any

from pydantic import Field

from embodyrl.config.settings import ChangesStateIds, Constraint, Seconds
from embodyrl.envs.text.settings import DialogueSettings


class OpenEnvSettings(DialogueSettings):
    """Config keys for an environment on an OpenEnv server."""

    url: Annotated[
        Annotated[str, Field(pattern=r"^(https?|wss?)://[^\s/]+(/\S*)?$"), Constraint("http://HOST:PORT")] | None,
        ChangesStateIds,
    ] = None
    """Address of the server, for example http://127.0.0.1:8000."""
    action_key: str | None = None
    """Field of the action that contains the reply; null: the only required text field of the server's actions."""
    action: dict[str, Any] = {}
    """Values of additional fields that every action contains."""
    observation_key: str | None = None
    """Observation field to include in the prompt, for example a.b for a nested field. null: all fields except metadata,
    as JSON."""
    observation_bytes: Annotated[int, Field(ge=16, le=1 << 20)] = 1 << 11
    """Maximum size of an observation in the prompt, in bytes; longer observations are truncated."""
    success_reward: Annotated[float, Field(ge=-(10**6), le=10**6)] = 1.0
    """Minimum reward of a step that counts as success."""
    connect_timeout_s: Seconds = 60.0
    """Maximum time until the server accepts a connection, in seconds."""
    answer_timeout_s: Seconds = 120.0
    """Time limit of a reset or a step on the server, in seconds."""

    @property
    def title(self) -> str:
        """Name of the environment in evaluation protocols."""
        return f"openenv {self.url}"
