"""Factory of environments on OpenEnv servers: config checks, spec and construction."""

from embodyrl.envs.openenv.environment import OpenEnv
from embodyrl.envs.openenv.session import read_action_key
from embodyrl.envs.openenv.settings import OpenEnvSettings
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.text.dialogue import build_dialogue_spec
from embodyrl.types import EnvSpec


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
        prompt_bytes = turn_bytes + (turn_bytes + OpenEnv.reply_bytes) * cfg.history
        return build_dialogue_spec(cfg, cfg.title, cfg.title, prompt_bytes)

    def make(self, cfg: OpenEnvSettings, context: EnvContext) -> OpenEnv:
        """Build `context.num_envs` environments; each opens its session at the first reset."""
        return OpenEnv(self._build_spec(cfg), cfg, read_action_key(cfg), context.num_envs)


FACTORY = OpenEnvFactory()
