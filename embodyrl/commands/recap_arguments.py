"""Assignment of the arguments of `recap` to the commands of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.config.compose import parse_override
from embodyrl.data.recap.settings import RecapSettings
from embodyrl.errors import ConfigError
from embodyrl.plan.checks import validate_settings

RECAP_PREFIX = "recap."
STAGES = {"collect", "sft", "eval"}
_STAGES_BY_SECTION = {
    **{key: {"collect", "eval"} for key in ("env", "rollout", "algorithm", "reward")},
    **{key: {"sft"} for key in ("actor", "objective", "data", "checkpoint")},
    **{key: {"eval"} for key in ("eval", "video", "video_cfg")},
    "collect": {"collect"},
}
"""Stages that use the keys of a config section; keys of other sections apply to all stages."""
_STAGES_BY_PREFIX = {
    **{f"runner.{key}": {"sft"} for key in ("max_steps", "max_epochs", "save_interval", "val_check_interval")},
    "env.train.": {"collect"},
    "env.eval.": {"eval"},
}
"""Exceptions to `_STAGES_BY_SECTION`: stages that use a key, or all keys with a prefix (which ends in a dot)."""
_RESERVED_KEYS = {
    "ckpt": "each round trains from model.path=FOLDER; an exported run is such a folder",
    "collect.out": "episodes are in recap.out",
    "collect.filter": "all episodes are kept",
    "collect.labels": "the policy's own actions are recorded",
    "data.more": "data.path is the first data set; join others with `embodyrl data merge`",
    "data.val_path": "no episode is held out from SFT",
    "data.val_share": "no episode is held out from SFT",
    "objective.name": "the actions of all episodes are imitated",
    "objective.labels": "the labels are in recap.out",
    "runner.output_dir": "runs are in recap.out",
    "runner.experiment_name": "runs are named by their round",
    "runner.on_existing": "the same command resumes an incomplete run",
    "runner.resume_dir": "the same command resumes an incomplete run",
}
"""Config keys that the user must not set, because `recap` sets them; each with a reason for the error message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of `embodyrl recap`, divided into model arguments and arguments of each stage."""

    cfg: RecapSettings
    seed: int
    demos: str
    by_stage: Mapping[str, tuple[str, ...]]
    """Arguments of each stage (`collect`, `sft`, `eval`), without the model arguments."""
    model: tuple[str, ...]
    """Arguments that select the model and its initial weights."""

    @property
    def out(self) -> Path:
        """Output folder of the rounds, `recap.out`."""
        return Path(self.cfg.out)


def get_stages(name: str) -> set[str]:
    """Return the stages that use a config key or config group."""
    matches = [stages for prefix, stages in _STAGES_BY_PREFIX.items() if name.startswith(prefix)]
    return matches[0] if matches else _STAGES_BY_SECTION.get(name.partition(".")[0], STAGES)


def read_arguments(arguments: Sequence[str]) -> Arguments:
    """Assign the command-line arguments to the stages of a RECAP run.

    Raises:
        ConfigError: a required argument is missing, or an argument is invalid; one line per problem.
    """
    values: dict[str, Any] = {}
    model: list[str] = []
    stages: dict[str, list[str]] = {stage: [] for stage in sorted(STAGES)}
    for argument in arguments:
        name, parsed = parse_override(argument)
        values[name] = parsed
        section = name.partition(".")[0]
        if section == "model":
            model.append(argument)
        elif section != RECAP_PREFIX.rstrip("."):
            for stage in get_stages(name):
                stages[stage].append(argument)
    problems = [f"{name}: {reason}; remove the key." for name, reason in _RESERVED_KEYS.items() if name in values]
    for name, expected in (
        ("data.path", "demonstrations: embodyrl collect env=... collect.out=DIR"),
        ("model", "the model of the initial weights, for example model=flow_small"),
        ("model.path", "the folder of the initial weights"),
        ("recap.out", "the folder of episodes, labels, runs and report"),
    ):
        if values.get(name) is None:
            problems.append(f"{name} is not set: {expected}.")
    recap_values = {
        name.removeprefix(RECAP_PREFIX): value for name, value in values.items() if name.startswith(RECAP_PREFIX)
    }
    cfg = validate_settings(RecapSettings, {"out": "missing"} | recap_values, problems)
    if problems or cfg is None:
        raise ConfigError(problems)
    return Arguments(
        cfg=cfg,
        seed=int(values.get("seed", 0)),
        demos=str(values["data.path"]),
        by_stage={stage: tuple(stage_arguments) for stage, stage_arguments in stages.items()},
        model=tuple(model),
    )
