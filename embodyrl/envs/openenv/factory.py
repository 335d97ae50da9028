"""Factory of environments on OpenEnv servers: config checks, spec and construction."""

from embodyrl.envs.openenv.environment import OpenEnv
from embodyrl.envs.openenv.session import read_action_key
from embodyrl.envs.openenv.settings import OpenEnvSettings
from embodyrl.envs.protocol import EnvContext
from embodyrl.types import ActionKind, ActionSpec, EnvSpec, SimulatorSpec, TextSpec

SEEDS = 100_000
"""Number of reset ids; each reset id is the seed of an episode."""


class OpenEnvFactory:
    """Builds environments on the server at `env.url`."""

    settings = OpenEnvSettings

    def validate(self, cfg: OpenEnvSettings) -> list[str]:
        """Return config errors, one line each."""
        if cfg.url is None:
            return [
                "env.url is not set. Set it to the address of an OpenEnv server, for example http://127.0.0.1:8000."
            ]
        return []

    def spec(self, cfg: OpenEnvSettings, context: EnvContext) -> EnvSpec:
        """Return the spec of the environment: one task, with one initial state per seed.

        Raises:
            EnvError: no server answers.
            ConfigError: `env.action_key` or `env.action` does not match the server's actions.
        """
        read_action_key(cfg)
        return self._build_spec(cfg)

    def _build_spec(self, cfg: OpenEnvSettings) -> EnvSpec:
        turn_bytes = cfg.observation_bytes + 64
        return EnvSpec(
            name=cfg.title,
            action=ActionSpec(dim=1, kind=ActionKind.text),
            tasks=(cfg.title,),
            states_per_task=(SEEDS,),
            text=TextSpec(
                max_replies=cfg.max_turns,
                roles=tuple(
                    (*(("system",) if cfg.prompt else ()), *("user", "assistant") * turns, "user")
                    for turns in range(min(cfg.history, 2) + 1)
                ),
                prompt_bytes=len(cfg.prompt.encode()) + turn_bytes + (turn_bytes + OpenEnv.reply_bytes) * cfg.history,
            ),
            simulator=SimulatorSpec(may_truncate=True, renders=False),
        )

    def make(self, cfg: OpenEnvSettings, context: EnvContext) -> OpenEnv:
        """Build `context.num_envs` environments; each opens its session at the first reset."""
        return OpenEnv(self._build_spec(cfg), cfg, read_action_key(cfg), context.num_envs)


FACTORY = OpenEnvFactory()
