"""Short runs on generated text tasks."""

from pathlib import Path

from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.plan.schema import Config
from embodyrl.types import ActionKind, ActionSpec, EnvSpec, TextSpec

SMALL = (
    "env.train.total_num_envs=8",
    "env.eval.total_num_envs=4",
    "eval.episodes=4",
    "algorithm.group_size=4",
    "runner.max_steps=2",
    "runner.val_check_interval=-1",
    "actor.micro_batch_size=4",
    "actor.global_batch_size=8",
)
ASKING = EnvSpec(
    name="text",
    action=ActionSpec(dim=1, kind=ActionKind.text),
    tasks=("text",),
    states_per_task=(1,),
    text=TextSpec(prompt_bytes=64),
)
"""Environment of short prompts, for policies without workers."""


def text_config(folder: Path, *overrides: str, task: str = "copy") -> Config:
    """Config of an inline run on a generated task that logs to files only."""
    words = [f"env=text/{task}", "model=causal_lm_tiny", "launcher=inline", "runner.logger.backends=[jsonl]"]
    cfg = load_config("train", [*words, f"runner.output_dir={folder}", *SMALL, *overrides])
    check_components(cfg)
    return cfg
