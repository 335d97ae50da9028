"""The table of commands: what each takes and where it lives. Light: it is imported for every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Flag:
    """One `--flag` and its argparse options."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of the program."""

    summary: str
    target: str
    """`module:function`; called with the parsed arguments, returns the exit code."""
    usage: str
    words: str = "override"
    words_help: str = "group=option or key=value"
    flags: tuple[Flag, ...] = ()
    examples: tuple[str, ...] = ()
    long_help: bool = False
    """Add groups and the commonest keys to the help."""

    def epilog(self) -> str:
        """Text below the flags in `--help`."""
        text = "examples:\n" + "\n".join(f"  {e}" for e in self.examples)
        if self.long_help:
            from embodyrl.cli.help import groups_and_keys

            text += "\n\n" + groups_and_keys()
        return text


def _switch(name: str, text: str) -> Flag:
    return Flag(name, {"action": "store_true", "help": text})


_JSON = _switch("--json", "print JSON")
_CONFIG_DIR = Flag(
    "--config-dir",
    {"action": "append", "default": [], "metavar": "DIR", "help": "further folder with YAML groups; repeatable"},
)
_RUN_FLAGS = (
    _switch("--print-config", "print the composed config as YAML (with --json as JSON) and stop"),
    _switch("--dry-run", "check everything, print what would run, and stop"),
    _switch("--json", "with --print-config: JSON instead of YAML"),
    _CONFIG_DIR,
)
_LISTS: tuple[str, ...] = ("envs", "models", "algorithms", "launchers", "experiments", "runs")

COMMANDS: dict[str, Command] = {
    "train": Command(
        summary="Train a policy by reinforcement learning inside a simulator.",
        target="embodyrl.cli.run:train",
        usage="embodyrl train [group=option ...] [key=value ...] [flags]",
        flags=(
            *_RUN_FLAGS,
            Flag(
                "--resume",
                {"metavar": "RUN", "help": "continue a run with its config; auto = by experiment name"},
            ),
        ),
        examples=(
            "embodyrl train",
            "embodyrl train experiment=libero_laptop",
            "embodyrl train env=libero_object algorithm=ppo env.train.task_ids=[0,3] seed=1",
            "embodyrl train env=libero_10 model=openvla_oft model.path=checkpoints/openvla-oft --dry-run",
            "embodyrl train --resume runs/my_run runner.max_steps=200",
        ),
        long_help=True,
    ),
    "eval": Command(
        summary="Measure the success of a policy; no training.",
        target="embodyrl.cli.run:evaluate",
        usage="embodyrl eval [group=option ...] [key=value ...] [flags]",
        flags=_RUN_FLAGS,
        examples=(
            "embodyrl eval",
            "embodyrl eval ckpt=runs/my_run env=libero_10",
            "embodyrl eval ckpt=runs/my_run/checkpoints/step_000200 eval.episodes_per_task=50",
            "embodyrl eval env=libero_object eval.episodes=20 video=failures",
            "embodyrl eval env=libero_10 model=openvla_oft model.path=checkpoints/openvla-oft --dry-run",
        ),
        long_help=True,
    ),
    "collect": Command(
        summary="Collect demonstrations: roll a policy out and keep what succeeds.",
        target="embodyrl.cli.run:collect",
        usage="embodyrl collect collect.out=DIR [group=option ...] [key=value ...] [flags]",
        flags=_RUN_FLAGS,
        examples=(
            "embodyrl collect env=tabletop collect.out=demos/tabletop",
            "embodyrl collect env=libero_object collect.out=demos/object collect.episodes=200 model.expert_noise=0.1",
            "embodyrl collect ckpt=runs/my_run model=openvla_oft_tiny collect.out=demos/mine",
        ),
    ),
    "sft": Command(
        summary="Train a policy on demonstrations (supervised).",
        target="embodyrl.cli.run:sft",
        usage="embodyrl sft data.path=DIR [model=option] [key=value ...] [flags]",
        flags=(*_RUN_FLAGS, Flag("--resume", {"metavar": "RUN", "help": "continue a run with its config"})),
        examples=(
            "embodyrl sft data.path=demos/tabletop",
            "embodyrl sft data.path=demos/object runner.max_steps=3000 actor.optim.lr=3e-4",
            "embodyrl sft --resume runs/my_run",
        ),
    ),
    "list": Command(
        summary="List what there is to choose from, and the runs so far.",
        target="embodyrl.cli.discover:list_things",
        usage=f"embodyrl list {{{','.join(_LISTS)}}} [--json]",
        words="what",
        words_help=f"one of {', '.join(_LISTS)}; for runs also runner.output_dir=DIR",
        flags=(_JSON, _CONFIG_DIR),
        examples=("embodyrl list envs", "embodyrl list experiments --json", "embodyrl list runs"),
    ),
    "show": Command(
        summary="Show keys: type, value after composition, default, meaning, and where the value comes from.",
        target="embodyrl.cli.discover:show",
        usage="embodyrl show [group | group=option | key | train] [overrides] [--json]",
        words="what",
        words_help="a group, a group with an option, a key, or train for all keys; overrides may follow",
        flags=(_JSON, _CONFIG_DIR),
        examples=(
            "embodyrl show env=libero_10",
            "embodyrl show algorithm",
            "embodyrl show train experiment=libero_laptop",
        ),
    ),
    "doctor": Command(
        summary="Check whether this machine can run it: Python, torch, memory, rendering, folders.",
        target="embodyrl.cli.doctor:doctor",
        usage="embodyrl doctor [overrides] [--json]",
        flags=(
            _JSON,
            _CONFIG_DIR,
        ),
        examples=("embodyrl doctor", "embodyrl doctor experiment=libero_laptop", "embodyrl doctor --json"),
    ),
    "check-env": Command(
        summary="Check that an environment keeps its contract; every violation with expected and found.",
        target="embodyrl.cli.check_env:check_env",
        usage="embodyrl check-env [env=option] [env.key=value ...] [--json]",
        flags=(_JSON, _CONFIG_DIR),
        examples=(
            "embodyrl check-env env=tabletop",
            "embodyrl check-env env=libero_object env.render_profile=lean env.train.task_ids=[0]",
            "embodyrl check-env env=my_env --config-dir my_env/conf",
            "embodyrl check-env env.env_type=my_package.my_module:FACTORY",
        ),
    ),
    "new": Command(
        summary="Write a small working package to start from: an environment, a policy, an algorithm, an experiment.",
        target="embodyrl.cli.new:new",
        usage="embodyrl new {env,policy,algorithm,experiment} NAME",
        words="word",
        words_help="what to write, and its name",
        examples=("embodyrl new env my_env", "embodyrl new policy my_policy", "embodyrl new experiment kitchen"),
    ),
}


def overview() -> str:
    """Text of `embodyrl --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    examples = [f"  {COMMANDS[name].examples[0]}" for name in ("train", "eval", "list", "doctor")]
    examples.insert(1, f"  {COMMANDS['train'].examples[1]}")
    return "\n".join(
        (
            "usage: embodyrl <command> [group=option ...] [key=value ...] [flags]",
            "",
            "Reinforcement learning for vision-language-action policies inside simulators.",
            "",
            "commands:",
            *lines,
            "",
            "examples:",
            *examples,
            "",
            "`embodyrl <command> --help` shows the flags and settings of a command.",
            "Exit codes: 0 ok, 1 failed, 2 usage or configuration, 3 a check failed, 4 workers beyond their restart",
            "budget, 5 non-finite numbers, 6 unusable checkpoint, 130 Ctrl-C.",
        )
    )
