"""Checks that join the config with the chosen environment, policy and algorithm; no simulator, no model, no torch."""

from collections.abc import Iterable

from embodyrl import algorithms
from embodyrl.config.keys import all_keys, leaves, spell
from embodyrl.config.schema import Config
from embodyrl.datasets.text import holds_text
from embodyrl.envs import ENVS
from embodyrl.errors import ConfigError, UnknownNameError
from embodyrl.launch import LAUNCHERS
from embodyrl.monitor.fanout import missing_loggers
from embodyrl.policies import POLICIES
from embodyrl.runtime.texts import env_setup_problems

_LOOP_ENV = frozenset({"env_type", "train", "eval"})
_LOOP_MODEL = frozenset({"model_type"})
"""Keys that the training loop itself reads, whatever component is chosen."""


_UNREAD: dict[str, tuple[str, ...]] = {
    "train": ("data", "reward", "collect"),
    "eval": ("data", "reward", "collect", "rollout.dump"),
    "collect": (
        *("data", "reward", "actor", "checkpoint", "video", "eval.episodes", "eval.episodes_per_task", "rollout.dump"),
        *("runner.max_steps", "runner.max_epochs", "runner.val_check_interval", "runner.save_interval"),
    ),
    "check-env": tuple(
        name
        for name in all_keys()
        if not name.startswith(("env.", "custom", "trust"))
        and name not in ("seed", "faults.step_timeout_s", "algorithm.group_size")
    ),
    "sft": (
        *("collect", "reward", "env", "algorithm", "rollout", "launcher", "actor.max_tokens_per_mbs"),
        *("runner.trace", "eval", "faults", "video", "video_cfg", "ckpt"),
    ),
}
"""Groups and keys that a command never looks at: setting them would be a mistake."""


_TEXT_DATA = (
    *("data.kwargs", "data.prompt_key", "data.answer_key", "data.answer_pattern"),
    *("data.prompt_template", "data.system_prompt", "data.max_prompt_length"),
)


def check_components(cfg: Config, command: str = "train") -> None:
    """Let the chosen environment, policy and algorithm judge their part of the config.

    Raises:
        ConfigError: unknown component names, problems that a component reports, keys that differ from their
            default although the command or the chosen component does not read them, and keys that the command
            cannot do without; one line each.
    """
    if command == "check-env" and any(name.startswith("data.") for name in _env_consumes(cfg)):
        raise ConfigError(
            f"env.env_type={cfg.env.env_type}: `embodyrl check-env` plays simulators with random actions, and this "
            f"environment judges written answers. `embodyrl train env=... --dry-run` checks its rows and rewards."
        )
    problems = [*_unread(cfg, command), *_missing(cfg, command), *missing_loggers(cfg.runner.logger.backends)]
    if command != "check-env":
        problems += _model(cfg)
    if command != "sft":
        problems += _env(cfg)
        problems += LAUNCHERS.problems([cfg.launcher.name], "launcher.name")
    if command in ("train", "eval"):
        problems += _algorithm(cfg)
    if problems:
        raise ConfigError(problems)


def _unread(cfg: Config, command: str) -> list[str]:
    problems: list[str] = []
    read = _env_consumes(cfg) if command in ("train", "eval") else frozenset()
    foreign: tuple[str, ...] = ()
    if command == "sft" and cfg.data.path is not None:
        foreign = ("data.image_aug",) if holds_text(cfg.data.path) else _TEXT_DATA
    for name, value in leaves(cfg):
        parts = (*_UNREAD[command], *foreign)
        unread = any(name == part or name.startswith(f"{part}.") for part in parts) and name not in read
        default = all_keys()[name].default
        if unread and value != default:
            problems.append(f"{name}={spell(value)}: `embodyrl {command}` does not read this key; leave it out.")
    return problems


def _env_consumes(cfg: Config) -> frozenset[str]:
    try:
        return ENVS.get(cfg.env.env_type).consumes
    except ConfigError:
        return frozenset()  # `_env` says what is wrong


def _missing(cfg: Config, command: str) -> list[str]:
    if command == "collect" and cfg.collect.out is None:
        return [
            "collect.out is not set: it wants a folder to write demonstrations to, for example collect.out=demos/a."
        ]
    if command == "sft" and cfg.data.path is None:
        return ["data.path is not set: it wants a folder with demonstrations; `embodyrl collect` writes one."]
    if cfg.data.val_path and cfg.data.val_share != all_keys()["data.val_share"].default:
        return [
            f"data.val_share={cfg.data.val_share}: data.val_path={cfg.data.val_path} already names validation data."
        ]
    return []


def _env(cfg: Config) -> list[str]:
    try:
        factory = ENVS.get(cfg.env.env_type)
    except ConfigError as error:
        return error.problems
    owner = f"env_type '{cfg.env.env_type}'"
    setup = env_setup_problems(cfg) if "data.path" in factory.consumes else []
    return [*setup, *factory.validate(cfg.env), *_ignored(cfg, "env", owner, _LOOP_ENV | factory.consumes)]


def _model(cfg: Config) -> list[str]:
    try:
        factory = POLICIES.get(cfg.model.model_type)
    except ConfigError as error:
        return error.problems
    owner = f"model_type '{cfg.model.model_type}'"
    return [*factory.validate(cfg.model), *_ignored(cfg, "model", owner, _LOOP_MODEL | factory.consumes)]


def _algorithm(cfg: Config) -> list[str]:
    chosen = cfg.algorithm
    problems = algorithms.problems(chosen)
    try:
        consumed = algorithms.consumed_keys(chosen.adv_type, chosen.loss_type)
    except UnknownNameError:
        return problems  # which name it was is among them
    owner = f"adv_type '{chosen.adv_type}' with loss_type '{chosen.loss_type}'"
    return [*problems, *_ignored(cfg, "algorithm", owner, consumed)]


def _ignored(cfg: Config, group: str, owner: str, consumed: Iterable[str]) -> list[str]:
    """Keys of a group that differ from their default but have no reader."""
    read = frozenset(consumed)
    problems: list[str] = []
    for name, value in leaves(cfg):
        head, _, rest = name.partition(".")
        if head != group or rest in read or rest.split(".")[0] in read:
            continue
        default = all_keys()[name].default
        if value != default:
            problems.append(
                f"{name}={spell(value)}: {owner} does not read this key. Leave it at {spell(default)}; "
                f"it reads: {', '.join(sorted(read))}."
            )
    return problems
