"""Factory of text environments: config checks, spec and construction."""

from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.text.environment import FINAL_REPLY_BYTES, TURN_BYTES, ConversationEnv, find_tool, get_answer_bytes
from embodyrl.envs.text.reward_runner import RewardRunner
from embodyrl.envs.text.settings import TextSettings
from embodyrl.registry import name_problems
from embodyrl.specs import image_names
from embodyrl.text.dataset import TextRows
from embodyrl.types import (
    ActionKind,
    ActionSpec,
    BenchmarkSpec,
    CameraSpec,
    EnvSpec,
    RewardSpec,
    SimulatorSpec,
    TextSpec,
)

_TURNS = 4
"""Number of turns after which the sequence of message roles is periodic."""
_BYTES_PER_TOKEN = 4
"""Estimated number of bytes per token of a tool's answer."""


class TextFactory:
    """Factory of conversations, with prompts from the config group `data` and reward functions from `reward`."""

    settings = TextSettings
    reads_rows = True

    def validate(self, cfg: TextSettings) -> list[str]:
        """Return config errors, one line each."""
        problems = name_problems("env.tools", cfg.tools, find_tool)
        if bool(cfg.tools) != (cfg.max_turns > 1):
            problems.append(
                f"env.max_turns={cfg.max_turns} with env.tools={list(cfg.tools)}: tools require max_turns above 1, and "
                f"max_turns above 1 requires tools. Set both or neither."
            )
        return problems

    def spec(self, cfg: TextSettings, context: EnvContext) -> EnvSpec:
        """Return the environment's spec: one task, with one initial state per data row."""
        rows, reward_runner = _get_parts(context)
        turns = ("assistant", cfg.tool_role)
        turn_tokens = rows.turn_tokens + get_answer_bytes(cfg.tools) // _BYTES_PER_TOKEN
        warning = f"{rows.repeated} of the {rows.held_out} held-out rows have the prompt of a training row"
        return EnvSpec(
            name=f"text/{rows.name}",
            warnings=(*((warning,) if rows.repeated else ()), *rows.warnings),
            text=TextSpec(
                roles=tuple(
                    (*roles, *turns * num_replies)
                    for roles in rows.roles
                    for num_replies in range(cfg.max_turns)[:_TURNS]
                ),
                max_replies=cfg.max_turns,
                prompt_tokens=rows.prompt_tokens and rows.prompt_tokens + turn_tokens * (cfg.max_turns - 1),
                prompt_bytes=rows.prompt_bytes + FINAL_REPLY_BYTES + TURN_BYTES * (cfg.max_turns - 1),
            ),
            action=ActionSpec(dim=1, kind=ActionKind.text),
            tasks=(rows.name,),
            states_per_task=(len(rows),),
            benchmark=BenchmarkSpec(held_out=rows.held_out),
            cameras=CameraSpec(names=image_names(rows.pictures), size=rows.image_size, needed=bool(rows.pictures)),
            reward=RewardSpec(
                components=reward_runner.components, weights=reward_runner.weights, success="from the reward"
            ),
            simulator=SimulatorSpec(renders=False),
        )

    def make(self, cfg: TextSettings, context: EnvContext) -> ConversationEnv:
        """Build `context.num_envs` conversations in this process."""
        return ConversationEnv(self.spec(cfg, context), cfg, *_get_parts(context), context.num_envs)


def _get_parts(context: EnvContext) -> tuple[TextRows, RewardRunner]:
    return context.parts["rows"], context.parts["reward_runner"]


FACTORY = TextFactory()
