"""Config sections that each command uses, and the conditions under which their keys have an effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from embodyrl.errors import ConfigError
from embodyrl.registry import closest


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSections:
    """Config sections that a command uses, and the conditions under which their keys have an effect."""

    sections: str
    """Names of the sections and of the keys without a section; every command has `seed`."""
    splits: tuple[str, ...] = ("train", "eval")
    """Splits of the environment in which the command runs episodes."""
    keys_by_condition: Mapping[str, str] = field(default_factory=dict)
    """Conditions under which keys have an effect, as in `Settings.keys_by_condition`."""


_VIDEO = "video_cfg.base_dir video_cfg.fps video_cfg.info_on_video faults.on_video_error"
_LOOP = (
    "runner.max_steps runner.max_epochs runner.val_check_interval runner.save_interval runner.resume_dir runner.profile"
)
"""Keys of the training loop, separated by spaces."""
_RUN = "trust model runner launcher actor faults"
"""Sections that every command with workers uses, separated by spaces."""
_ACT = f"{_RUN} ckpt env algorithm rollout eval video_cfg"
"""Sections that every command with episodes uses, separated by spaces."""
_SAMPLED = {
    "eval.sampling_params.do_sample": "algorithm.sampling_params.temperature algorithm.sampling_params.top_k "
    "algorithm.sampling_params.top_p"
}
"""Sampling keys and their conditions for commands that run episodes without RL training (see
`Settings.keys_by_condition`)."""
_TRAIN = CommandSections(
    sections=f"{_ACT} video critic checkpoint",
    keys_by_condition={
        "runner.only_eval or runner.val_check_interval!=-1": "video runner.val_suites checkpoint.keep_best",
        "video!=none": _VIDEO,
        "algorithm.value_coef": "critic.path",
        "algorithm.value_coef or algorithm.tau": "actor.optim.value_lr actor.optim.value_clip_grad",
        "algorithm.replay_size=null: batches of actor.global_batch_size are sampled": "actor.minibatches",
        "actor.minibatches=null or algorithm.replay_size: actor.minibatches is set": "actor.global_batch_size",
    },
)
_EVAL = CommandSections(
    sections=f"{_ACT} video",
    splits=("eval",),
    keys_by_condition={
        "video!=none": _VIDEO,
        "never: nothing is trained": f"{_LOOP} actor.optim runner.only_eval rollout.mode rollout.num_workers",
        "never: `embodyrl eval` runs episodes of env.eval": "env.train",
    }
    | _SAMPLED,
)
_RECORDED = {
    "never: episodes are recorded as a data set": "video_cfg faults.on_video_error",
    "never: `collect` runs collect.episodes of env.train": "env.eval eval.episodes eval.episodes_per_task "
    "eval.samples eval.show_replies eval.sampling_params.temperature",
}


_COLLECT = CommandSections(
    sections=f"{_ACT} collect",
    splits=("train",),
    keys_by_condition={
        "never: nothing is trained": f"{_LOOP} actor.optim",
        "never: collect.out contains the episodes": "runner.keep_episodes",
    }
    | _SAMPLED
    | _RECORDED,
)
_SFT = CommandSections(
    sections=f"{_RUN} checkpoint data objective",
    keys_by_condition={
        "never: no episodes are run": "runner.only_eval runner.keep_episodes runner.val_suites runner.trace "
        "runner.profile faults.step_timeout_s faults.on_env_crash faults.max_restarts_per_worker",
        "never: SFT samples batches of actor.global_batch_size": "actor.minibatches",
        "objective.name=dpo: the statistics are those of data.path": "model.unnorm_key",
        "runner.val_check_interval!=-1": "data.val_path data.val_split checkpoint.keep_best",
    },
)
_DAGGER = CommandSections(
    sections=f"{_ACT} checkpoint collect dagger data objective",
    splits=("train",),
    keys_by_condition={
        "never: every round collects all episodes with labels of the expert": "collect.labels collect.filter",
        "never: DAgger uses behavior cloning": "objective.name",
        "never: SFT samples batches of actor.global_batch_size": "actor.minibatches",
        "never: only `embodyrl train` is profiled": "runner.profile",
        "never: the same command resumes an incomplete run": "runner.on_existing runner.resume_dir",
    }
    | _SAMPLED
    | _RECORDED,
)
_CHECK_ENV = CommandSections(sections="trust env faults", splits=("train",))
_SERVE = CommandSections(sections="trust model ckpt env serve")
_SECTIONS_BY_COMMAND = {
    "check-env": _CHECK_ENV,
    "collect": _COLLECT,
    "dagger": _DAGGER,
    "eval": _EVAL,
    "serve": _SERVE,
    "sft": _SFT,
    "train": _TRAIN,
}
COMMANDS = tuple(_SECTIONS_BY_COMMAND)
"""Commands that have a config."""


def get_command_sections(command: str) -> CommandSections:
    """Return the config sections of a command.

    Raises:
        ConfigError: the command has no config.
    """
    if (sections := _SECTIONS_BY_COMMAND.get(command)) is not None:
        return sections
    hint = closest(command, _SECTIONS_BY_COMMAND)
    raise ConfigError(
        f"The command '{command}' has no config.{hint} Commands with a config: {', '.join(_SECTIONS_BY_COMMAND)}."
    )


def uses_section(command: str, section: str) -> bool:
    """Return True if a command uses a section."""
    return section == "seed" or section in get_command_sections(command).sections.split()
