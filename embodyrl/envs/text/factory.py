"""Checks, description and construction of text environments."""

from dataclasses import fields

from embodyrl.config.schema import DataConfig, EnvConfig, RewardConfig
from embodyrl.envs.protocol import EnvSetup
from embodyrl.envs.text.environment import LAST_BYTES, TOOLS, TURN_BYTES, ConversationEnv
from embodyrl.types import ActionKind, ActionSpace, EnvSpec


class TextFactory:
    """Builds the environment of the rows in `data` and the rewards in `reward`."""

    consumes = frozenset(
        {"max_turns", "tools", "reward_coef"}
        | {f"data.{field.name}" for field in fields(DataConfig) if field.name != "image_aug"}
        | {f"reward.{field.name}" for field in fields(RewardConfig)}
    )

    def validate(self, cfg: EnvConfig) -> list[str]:
        """Return config problems, one line each."""
        problems = TOOLS.problems(cfg.tools, "env.tools")
        if bool(cfg.tools) != (cfg.max_turns > 1):
            problems.append(
                f"env.max_turns={cfg.max_turns} with env.tools={list(cfg.tools)}: tools and further turns "
                "need each other; set both or neither."
            )
        return problems

    def spec(self, cfg: EnvConfig) -> EnvSpec:
        """Describe the environment: one task, whose initial states are the rows."""
        assert isinstance(cfg, EnvSetup) and cfg.rows is not None and cfg.judge is not None
        rows = cfg.rows
        return EnvSpec(
            name=f"text/{rows.name}",
            action_dim=1,
            tasks=(rows.name,),
            states_per_task=(len(rows),),
            action_space=ActionSpace(kind=ActionKind.text),
            max_chunks=cfg.max_turns,
            prompt_bytes=rows.prompt_bytes + LAST_BYTES + TURN_BYTES * (cfg.max_turns - 1),
            held_out=rows.held_out,
            components=cfg.judge.components,
            component_weights=cfg.judge.weights,
        )

    def make(self, cfg: EnvConfig, num_slots: int) -> ConversationEnv:
        """Build `num_slots` conversations in this process."""
        assert isinstance(cfg, EnvSetup) and cfg.rows is not None and cfg.judge is not None
        return ConversationEnv(self.spec(cfg), cfg, cfg.rows, cfg.judge, num_slots)


FACTORY = TextFactory()
