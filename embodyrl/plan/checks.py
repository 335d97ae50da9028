"""Checks of a config: types and ranges, contradictions, keys without effect, and the chosen components."""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from embodyrl.algorithms.settings import AlgorithmSettings
from embodyrl.cluster import LAUNCHERS
from embodyrl.cluster.protocol import ProcessSettings
from embodyrl.config.compose import Setting
from embodyrl.config.settings import Key, Settings, find_key, format_value, get_parents, nested, to_builtin
from embodyrl.config.shared import SamplingSettings
from embodyrl.data.settings import DemonstrationSettings
from embodyrl.envs import ENVS
from embodyrl.envs.reward import StepRewardSettings, reward_problems
from embodyrl.errors import ConfigError, shorten
from embodyrl.monitor.group import find_logger_problems
from embodyrl.plan.command_sections import get_command_sections
from embodyrl.plan.experts import find_expert
from embodyrl.plan.generation import generation_problems
from embodyrl.plan.schema import Config, Schema, TopSettings
from embodyrl.plan.settings import RolloutMode
from embodyrl.plan.text import text_problems
from embodyrl.plan.weights import resolve_weights
from embodyrl.policies import POLICIES
from embodyrl.registry import closest, name_problems
from embodyrl.text.settings import PairSettings
from embodyrl.types import ActionKind, PolicySpec

log = logging.getLogger(__name__)
S = TypeVar("S", bound=Settings)
_NO_SETTINGS: Mapping[str, Setting] = MappingProxyType({})
_TEXT_ONLY = ("rollout.backend", "critic.path", "algorithm.reference_url")
_TEXT_GENERATION_KEYS = (
    *(f"algorithm.sampling_params.{name}" for name in SamplingSettings.model_fields if name != "temperature"),
    *("actor.max_tokens_per_mbs", "eval.show_replies", "rollout.logprobs", "algorithm.reference_model"),
)
"""Keys for text generation, which have no effect on policies with real-valued or categorical actions."""


def build_checked_config(
    schema: Schema,
    values: Mapping[str, Any],
    last: Mapping[str, Setting],
    unused_key_warnings: list[str],
    problems: list[str],
) -> Config:
    """Build a config with warnings and sources. `last` contains the effective setting of each key, with its source.

    Raises:
        ConfigError: `problems` and invalid values; if there are none, contradictions between values.
    """
    cfg = validate_config(schema, values, problems, last)
    if cfg is None or problems:
        raise ConfigError(problems)
    cfg.add_sources({name: last[name].source for name in values})
    if cfg.has("env"):
        cfg.env.set_splits(get_command_sections(cfg.command).splits)
    if problems := [*find_contradictions(cfg)]:
        raise ConfigError(problems)
    cfg.add_sources(warnings=[*unused_key_warnings, *no_effect_warnings(cfg, cfg.changed, cfg.conditions)])
    return cfg


def validate_config(
    schema: Schema, values: Mapping[str, Any], problems: list[str], last: Mapping[str, Setting] = _NO_SETTINGS
) -> Config | None:
    """Build a config from values by dotted key. If a value is invalid, append errors to `problems` and return None."""
    tree, keys, errors = nested(values), schema.keys, list[str]()
    top = {name: tree.pop(name) for name in TopSettings.model_fields if name in tree}
    sections: dict[str, Any] = {"": build_settings(TopSettings, top, keys, last, errors)}
    for name, kind in schema.sections.items():
        section, prefix = tree.get(name, {}), f"{name}."
        # The keys of the loss and of the estimator are both in the section `algorithm`.
        if name == "algorithm" and isinstance(section, dict):
            loss_values = {key: value for key, value in section.items() if key in schema.loss.model_fields}
            section = {
                key: value for key, value in section.items() if key not in loss_values or key in kind.model_fields
            }
            sections["loss"] = build_settings(schema.loss, loss_values, keys, last, errors, prefix)
        sections[name] = build_settings(kind, section, keys, last, errors, prefix)
    problems += dict.fromkeys(errors)
    if errors:
        return None
    top, loss = sections.pop(""), sections.pop("loss", None)
    if isinstance(algorithm := sections.get("algorithm"), AlgorithmSettings):
        sections["algorithm"] = algorithm.model_copy(update={"loss": loss})
    return Config.build(schema, {name: getattr(top, name) for name in TopSettings.model_fields} | sections)


def build_settings(
    kind: type[S],
    tree: Any,
    keys: Mapping[str, Key],
    last: Mapping[str, Setting],
    problems: list[str],
    prefix: str = "",
) -> S | None:
    """Build settings from nested values. If a value is invalid, append errors to `problems` and return None.

    Types are strict: a string is not converted to a number, nor a number to a boolean.
    """
    try:
        return kind.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        problems += _format_value_errors(keys, prefix, last, error)
    return None


def _format_value_errors(
    keys: Mapping[str, Key], prefix: str, last: Mapping[str, Setting], error: ValidationError
) -> Iterator[str]:
    for entry in error.errors(include_url=False):
        parts = [*prefix.split(".")[:-1], *(str(part) for part in entry["loc"])]
        names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        name = next((candidate for candidate in names if find_key(keys, candidate) is not None), names[0])
        key, setting = find_key(keys, name), last.get(name)
        if key is None or entry["type"] == "missing":
            yield f"{name} is not set."
            continue
        value = to_builtin(setting.value if setting else entry["input"])
        source = f"{setting.where if setting else ''}{name}={shorten(format_value(value))} "
        if setting and setting.is_set_by_user:
            source = setting.where
        yield f"{source}{_format_rule(key, value)}"


def _format_rule(key: Key, value: Any) -> str:
    default = "" if key.required else f" Default: {format_value(key.default)}."
    return f"must be {key.expectation}.{closest(str(value), key.choices)}{default}"


def check_value(key: Key, value: Any) -> list[str]:
    """Return an error if a value of a key that this command does not use has a wrong type or range."""
    kind: Any = Annotated[key.field.annotation, key.field]
    try:
        TypeAdapter(kind, config=Settings.model_config).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError:
        return [f"{key.name}={shorten(format_value(value))} {_format_rule(key, value)}"]
    return []


def no_effect_warnings(root: Settings, names: Iterable[str], keys_by_condition: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each key in `names` that has no effect because of the values of other keys.

    `keys_by_condition` contains conditions in addition to `Settings.keys_by_condition` of the classes.
    """
    conditions = {key: ("", condition) for condition, keys in keys_by_condition.items() for key in keys.split()} | {
        prefix + key: (prefix, condition)
        for prefix, node in root.nodes()
        for settings_class in reversed(type(node).__mro__)
        for condition, keys in settings_class.__dict__.get("keys_by_condition", {}).items()
        for key in keys.split()
    }
    for name in names:
        key_name = next((part for part in (name, *get_parents(name)) if part in conditions), name)
        prefix, text = conditions.get(key_name, ("", ""))
        condition, _, reason = text.partition(": ")
        alternatives = [
            [part[1:] if part.startswith("/") else prefix + part for part in alternative.split(" and ")]
            for alternative in condition.split(" or ")
        ]
        if condition and not any(all(_condition_is_met(root, part) for part in parts) for parts in alternatives):
            needed = " or ".join(map(" and ".join, alternatives))
            yield f"{name} has no effect" + (f": {reason}." if reason else f" without {needed}.")


def _condition_is_met(root: Settings, condition: str) -> bool:
    name, operator, choices = re.split("(!=|=|$)", condition, maxsplit=1)
    value = root.get(name)
    if not operator:
        return bool(value)
    return (format_value(value) in choices.split("|")) is (operator == "=")


def find_contradictions(cfg: Config) -> Iterator[str]:
    """Yield one line per contradiction between values of a config, with the fix."""
    for _, node in cfg.nodes():
        yield from node.problems()
    if cfg.has("objective"):
        yield from _objective_problems(cfg)
    for key, value in cfg.programs.items():
        if not cfg.trust:
            yield (
                f"{key}={value} downloads a program from the hub and runs it on this host. Read its env.py; if you "
                "trust the author, add trust=true."
            )
    # The section exists only for a launcher that runs on several hosts.
    if cfg.has("cluster"):
        try:
            disaggregated = cfg.rollout_processes > 0
            LAUNCHERS.get(cfg.launcher.name).nodes(cfg.cluster, disaggregated=disaggregated)
        except ConfigError as error:
            yield str(error)
    # Only the command line is checked: a file with this value may also be used for training.
    evaluates_once = not cfg.is_train_command or cfg.runner.only_eval
    if evaluates_once and cfg.is_set_by_user("video") and cfg.video.startswith("changed:"):
        yield f"video={cfg.video} compares two validations of a training run. Use first:N, failures or all."
    if cfg.is_train_command:
        yield from _training_problems(cfg)
    if cfg.has("checkpoint"):
        yield from _rank_problems(cfg)


def _objective_problems(cfg: Config) -> Iterator[str]:
    """Yield an error if `data.path` does not contain the type of data that the SFT objective needs."""
    objective = cfg.objective
    if objective.name in ("imitation", "dpo") or not cfg.data.path:
        return
    expected_class = PairSettings if objective.needs_text_pairs else DemonstrationSettings
    if not isinstance(cfg.data, expected_class):
        expected = "rows of text with two answers" if objective.needs_text_pairs else "episodes that `collect` wrote"
        yield f"objective.name={objective.name} needs {expected}; data.path={cfg.data.path} contains other data."


def _training_problems(cfg: Config) -> Iterator[str]:
    yield from _env_count_problems(cfg)
    if cfg.algorithm.max_staleness:
        yield from _staleness_problems(cfg)
    if cfg.critic.path is not None and (cfg.runner.deterministic or cfg.actor.fsdp.size > 1):
        yield (
            "critic.path: a separate critic works with one actor rank and without runner.deterministic=true. Set "
            "actor.fsdp.size=1 and runner.deterministic=false, or use the policy's value head."
        )
    if cfg.runner.profile is not None and LAUNCHERS.get(cfg.launcher.name).spans_hosts:
        yield f"runner.profile works on one host: remove runner.profile, or launcher={cfg.launcher.name}."
    if cfg.runner.resume_dir is not None and cfg.ckpt is not None:
        yield (
            f"ckpt={cfg.ckpt} and runner.resume_dir={cfg.runner.resume_dir}: a resumed run loads its own "
            "weights. Use one of the two keys."
        )


def _rank_problems(cfg: Config) -> Iterator[str]:
    size = cfg.actor.fsdp.size
    if size > 1 and LAUNCHERS.get(cfg.launcher.name).in_process:
        yield f"actor.fsdp.size={size}: launcher={cfg.launcher.name} has one process; use launcher=local or one rank."
    elif size > 1 and cfg.is_train_command and cfg.rollout.backend != "hf" and not cfg.rollout.processes:
        yield (
            f"rollout.backend={cfg.rollout.backend} generates with one actor rank. Use actor.fsdp.size=1, "
            "rollout.mode=disaggregated, or rollout.backend=hf."
        )
    elif size > 1 and cfg.model.is_compiled:
        key = "model.cuda_graphs" if cfg.model.uses_cuda_graphs else "model.compile"
        yield f"{key}=true works with one actor rank. Use actor.fsdp.size=1, or {key}=false."


def _env_count_problems(cfg: Config) -> Iterator[str]:
    """Yield errors if the number of environments does not fit the group size or the launcher, with the fix."""
    num_envs, size = cfg.env.train.total_num_envs, cfg.algorithm.group_size
    if num_envs % size:
        near_counts = [count for count in ((num_envs // size) * size, (num_envs // size + 1) * size) if count]
        best_size = min(
            (divisor for divisor in range(1, num_envs + 1) if num_envs % divisor == 0),
            key=lambda divisor: (abs(divisor - size), divisor),
        )
        yield (
            f"env.train.total_num_envs={num_envs} is not divisible by algorithm.group_size={size}: every group needs "
            f"one environment per member. Use env.train.total_num_envs={' or '.join(map(str, near_counts))}, "
            f"or algorithm.group_size={best_size}."
        )
    elif size > 1 and not cfg.env.train.use_fixed_reset_state_ids:
        yield (
            f"algorithm.group_size={size} compares episodes from one initial state, so it needs "
            "env.train.use_fixed_reset_state_ids=true."
        )
    workers = cfg.launcher.env_workers if isinstance(cfg.launcher, ProcessSettings) else "auto"
    if workers != "auto" and workers > num_envs:
        yield (
            f"launcher.env_workers={workers} but only env.train.total_num_envs={num_envs} environments: some workers "
            f"would idle. Use launcher.env_workers={num_envs}."
        )


def _staleness_problems(cfg: Config) -> Iterator[str]:
    """Yield an error, with its fix, for each setting that asynchronous rollouts do not support."""
    max_staleness, fsdp = cfg.algorithm.max_staleness, cfg.actor.fsdp
    if cfg.runner.deterministic:
        yield (
            f"algorithm.max_staleness={max_staleness}: the weights of an asynchronous rollout depend on timing, so "
            "runner.deterministic=true is impossible. Remove one of the two keys."
        )
    if (fsdp.size > 1 or fsdp.cpu_offload) and cfg.rollout.mode is RolloutMode.collocated:
        yield (
            f"algorithm.max_staleness={max_staleness} samples actions during updates, which needs one actor rank "
            "without offloading. Use rollout.mode=disaggregated, or actor.fsdp.size=1 and actor.fsdp.cpu_offload=false."
        )
    if cfg.algorithm.curriculum:
        yield "algorithm.curriculum needs the outcomes of the previous step; set algorithm.max_staleness=0."


def check_components(cfg: Config) -> None:
    """Run the checks of the environment, the policy and other components, and raise all their errors together.

    Raises:
        CheckpointError: `algorithm.reference_path` has no weights.
        ConfigError: problems reported by a component, and missing keys of the command; one line each.
    """
    problems = [*_find_missing_keys(cfg)]
    if cfg.has("dagger"):
        problems += name_problems("dagger.expert", [cfg.dagger.expert], find_expert)
    if cfg.has("runner"):
        problems += find_logger_problems(cfg.runner.logger.backends)
    if cfg.is_train_command and cfg.algorithm.reference_path is not None:
        resolve_weights(str(cfg.algorithm.reference_path), "algorithm.reference_path")
    if cfg.has("model"):
        problems += POLICIES.get(cfg.model.model_type).validate(cfg.model)
    if cfg.has("env"):
        if isinstance(cfg.reward, StepRewardSettings):
            problems += reward_problems(cfg.reward)
        factory = ENVS.get(cfg.env.env_type)
        if cfg.reads_rows and cfg.has_rollouts:
            problems += text_problems(cfg)
        problems += factory.validate(cfg.env)
    if problems:
        raise ConfigError(problems)


def _find_missing_keys(cfg: Config) -> Iterator[str]:
    """Yield an error, with its fix, for each required key of the command that is not set.

    Raises:
        ConfigError: the command does not support the environment.
    """
    if cfg.has("collect") and cfg.collect.out is None:
        yield "collect.out is not set. Set a folder for the demonstrations, for example collect.out=demos/a."
    if cfg.has("objective") and cfg.data.path is None:
        yield "data.path is not set. Set a folder with demonstrations, for example a result of `embodyrl collect`."
    if cfg.has("dagger") and cfg.reads_rows:
        raise ConfigError(
            f"env.env_type={cfg.env.env_type}: `embodyrl dagger` corrects robot policies, and this environment "
            "evaluates text replies. Choose a simulator, or train with `embodyrl sft` or `embodyrl train`."
        )
    if cfg.command == "check-env" and cfg.reads_rows:
        raise ConfigError(
            f"env.env_type={cfg.env.env_type}: `embodyrl check-env` checks only simulators, and this environment "
            "evaluates text replies. To check its rows and rewards, run `embodyrl train env=... --dry-run`."
        )
    if cfg.command == "check-env" and cfg.env.delay[1]:
        raise ConfigError(
            "env.control.latency_steps must be 0: `embodyrl check-env` checks environments without inference delay."
        )


def key_problems(cfg: Config, policy: PolicySpec) -> list[str]:
    """Return an error for each key that the policy does not support."""
    if ActionKind.text in policy.action_kinds:
        return generation_problems(cfg, policy)
    for name in cfg.changed:
        if name in _TEXT_GENERATION_KEYS:
            log.warning("warning: %s has no effect: model '%s' chooses actions, not text.", name, policy.name)
    return [
        f"{name}: for text policies only; model '{policy.name}' outputs actions. Remove the key."
        for name in _TEXT_ONLY
        if name in cfg.changed
    ]
