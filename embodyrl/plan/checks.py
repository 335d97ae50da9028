"""Checks of a config: types and ranges, contradictions, keys without effect, and the chosen components."""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError, create_model

from embodyrl.cluster import LAUNCHERS
from embodyrl.cluster.protocol import LauncherSettings, ProcessSettings
from embodyrl.config.compose import Setting
from embodyrl.config.settings import Key, Settings, find_key, parents_of, plain, spell
from embodyrl.envs import ENVS
from embodyrl.envs.reward import StepRewardSettings, reward_problems
from embodyrl.envs.settings import TrainSplit
from embodyrl.errors import ConfigError, short
from embodyrl.learners.settings import FsdpSettings
from embodyrl.monitor.fanout import missing_loggers
from embodyrl.plan.experts import find_expert
from embodyrl.plan.reads import get_reads
from embodyrl.plan.schema import Config
from embodyrl.plan.settings import RolloutMode
from embodyrl.plan.text import text_problems
from embodyrl.plan.weights import resolve_weights
from embodyrl.policies import POLICIES
from embodyrl.registry import closest, name_problems
from embodyrl.types import ActionKind, PolicySpec

log = logging.getLogger(__name__)
S = TypeVar("S", bound=Settings)
_SAMPLING = (
    *("top_k", "top_p", "repetition_penalty", "stop", "stop_token_ids"),
    *("min_new_tokens", "max_new_tokens", "frequency_penalty", "presence_penalty"),
)
_TEXT_ONLY = ("rollout.backend", "critic.path", "algorithm.reference_url")
_INERT = (
    *(f"algorithm.sampling_params.{name}" for name in _SAMPLING),
    *("actor.max_tokens_per_mbs", "eval.show_replies", "rollout.logprobs", "algorithm.reference_model"),
)
"""Keys for text generation, which have no effect on policies with real-valued or categorical actions."""


def checked(
    root: type[Config], read: Mapping[str, Any], last: Mapping[str, Setting], unread: list[str], problems: list[str]
) -> Config:
    """Return the config of the class `root` with the values `read`, its warnings and the sources of its values.

    Raises:
        ConfigError: `problems` and invalid values, or, if there are none, contradictions.
    """
    cfg = validated(root, read, problems, last)
    if cfg is None or problems:
        raise ConfigError(problems)
    cfg.note({name: last[name].source for name in read})
    if cfg.has("env"):
        cfg.env.play(get_reads(cfg.command).plays)
    if problems := [*contradictions(cfg)]:
        raise ConfigError(problems)
    cfg.note(warnings=[*unread, *inert(cfg, cfg.changed, cfg.conditions)])
    return cfg


def validated(
    root: type[S], values: Mapping[str, Any], problems: list[str], last: Mapping[str, Setting] = MappingProxyType({})
) -> S | None:
    """Build settings from values by dotted key. If a value is invalid, append errors to `problems` and return None.

    Types are strict: a string is not converted to a number, nor a number to a boolean. `last` contains the source of
    each value, for messages.
    """
    tree, below, wrong = nested(values), {}, []
    for name, kind in root.inlined.items():
        section, info = tree.get(name, {}), root.model_fields[name]
        own = {key: value for key, value in section.items() if key in kind.model_fields}
        others = getattr(info.annotation, "model_fields", {})
        tree[name] = {key: value for key, value in section.items() if key not in own or key in others}
        below[name] = _valid(kind, own, f"{name}.", root, last, wrong)
    whole = _valid(root, tree, "", root, last, wrong)
    problems += dict.fromkeys(wrong)
    if whole is None or wrong:
        return None
    sections = {name: getattr(whole, name) for name in below}
    complete = {name: s.model_copy(update={s.flattened: below[name]}) for name, s in sections.items()}
    return whole.model_copy(update=complete)


def nested(leaves_by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Build nested mappings from values by dotted name; the inverse of `flat`."""
    tree: dict[str, Any] = {}
    for name, value in leaves_by_name.items():
        *parents, last = name.split(".")
        at = tree
        for part in parents:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


def _valid(
    kind: type[S], tree: Any, prefix: str, root: type[Settings], last: Mapping[str, Setting], problems: list[str]
) -> S | None:
    try:
        return kind.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        problems += _wrong_values(root, prefix, last, error)
    return None


def _wrong_values(
    root: type[Settings], prefix: str, last: Mapping[str, Setting], error: ValidationError
) -> Iterator[str]:
    for one in error.errors(include_url=False):
        parts = [*prefix.split(".")[:-1], *(str(part) for part in one["loc"])]
        names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        name = next((n for n in names if find_key(root, n) is not None), names[0])
        key, setting = find_key(root, name), last.get(name)
        if key is None or one["type"] == "missing":
            yield f"{name} is not set."
            continue
        value = plain(setting.value if setting else one["input"])
        said = f"{setting.where if setting else ''}{name}={short(spell(value))} "
        if setting and setting.typed:
            said = setting.where
        default = "" if key.required else f" Default: {spell(key.default)}."
        yield f"{said}must be {key.expectation}.{closest(str(value), key.choices)}{default}"


def wrong_value(key: Key, value: Any) -> list[str]:
    """Return errors if a value has a wrong type or range for a key that this command does not use."""
    fields: dict[str, Any] = {"value": (key.field.annotation, key.field)}
    kind = create_model(key.owner.__name__, __base__=Settings, **fields)
    lines: list[str] = []
    validated(kind, {"value": value}, lines)
    return [line.replace("value=", f"{key.name}=", 1) for line in lines]


def inert(root: Settings, names: Iterable[str], needs: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each key in `names` that has no effect because of the values of other keys.

    `needs` contains conditions in addition to `Settings.needs` of the classes.
    """
    conditions = {key: ("", condition) for condition, keys in needs.items() for key in keys.split()} | {
        prefix + key: (prefix, condition)
        for prefix, node in _sections(root)
        for kind in reversed(type(node).__mro__)
        for condition, keys in kind.__dict__.get("needs", {}).items()
        for key in keys.split()
    }
    for name in names:
        found = next((at for at in (name, *parents_of(name)) if at in conditions), name)
        prefix, text = conditions.get(found, ("", ""))
        condition, _, reason = text.partition(": ")
        alternatives = [one[1:] if one.startswith("/") else prefix + one for one in condition.split(" or ")]
        if condition and not any(_holds(root, one) for one in alternatives):
            yield f"{name} has no effect" + (f": {reason}." if reason else f" without {' or '.join(alternatives)}.")


def _holds(root: Settings, condition: str) -> bool:
    name, operator, choices = re.split("(!=|=|$)", condition, maxsplit=1)
    value = root.get(name)
    if not operator:
        return bool(value)
    return (spell(value) in choices.split("|")) is (operator == "=")


def _sections(node: Settings, prefix: str = "") -> Iterator[tuple[str, Settings]]:
    """Yield (dotted prefix, settings) of a section and all nested sections."""
    yield prefix, node
    for name in type(node).model_fields:
        if isinstance(value := getattr(node, name), Settings):
            yield from _sections(value, prefix if name == node.flattened else f"{prefix}{name}.")


def contradictions(cfg: Config) -> Iterator[str]:
    """Yield one line per contradiction between values of a config, with the fix."""
    for _, node in _sections(cfg):
        yield from node.problems()
    for section in cfg.added.values():
        yield from section.problems(cfg)
    for key, value in cfg.programs.items():
        if not cfg.trust:
            yield (
                f"{key}={value} downloads a program from the hub and runs it on this host. Read its env.py; if you "
                "trust the author, add trust=true."
            )
    # The section exists only with a launcher that brings it along.
    if cfg.has("cluster"):
        try:
            apart = cfg.acting_processes > 0
            LAUNCHERS.get(cfg.launcher.name).nodes(cfg.cluster, separate=apart)
        except ConfigError as error:
            yield str(error)
    # A file serves training as well.
    if cfg.typed("video") and cfg.video.startswith("changed:") and (not cfg.trains or cfg.runner.only_eval):
        yield f"video={cfg.video} compares two validations of a training. Use first:N, failures or all."
    if cfg.trains:
        yield from _training_problems(cfg)
    if cfg.has("checkpoint"):
        yield from _rank_problems(cfg)


def _training_problems(cfg: Config) -> Iterator[str]:
    yield from slot_problems(cfg.env.train, cfg.algorithm.group_size, cfg.launcher)
    lag, certain = cfg.algorithm.max_staleness, cfg.runner.deterministic
    yield from staleness_problems(lag, cfg.actor.fsdp, cfg.rollout.mode, deterministic=certain)
    if cfg.algorithm.curriculum and lag:
        yield "algorithm.curriculum needs the outcomes of the previous step; set algorithm.max_staleness=0."
    if cfg.critic.path is not None and (certain or cfg.actor.fsdp.size > 1):
        yield (
            "critic.path: a separate critic works with one actor rank and without runner.deterministic=true. Set "
            "actor.fsdp.size=1 and runner.deterministic=false, or use the policy's value head."
        )
    if cfg.runner.resume_dir is not None and cfg.ckpt is not None:
        yield (
            f"ckpt={cfg.ckpt} and runner.resume_dir={cfg.runner.resume_dir}: a resumed run loads its own "
            "weights. Use one of the two keys."
        )


def _rank_problems(cfg: Config) -> Iterator[str]:
    size = cfg.actor.fsdp.size
    if size > 1 and LAUNCHERS.get(cfg.launcher.name).in_process:
        yield f"actor.fsdp.size={size}: launcher={cfg.launcher.name} has one process; use launcher=local or one rank."
    elif size > 1 and cfg.trains and cfg.rollout.backend != "hf" and not cfg.rollout.acting_processes:
        yield (
            f"rollout.backend={cfg.rollout.backend} generates with one actor rank. Use actor.fsdp.size=1, "
            "rollout.mode=disaggregated, or rollout.backend=hf."
        )
    elif size > 1 and cfg.model.compiled:
        key = "model.cuda_graphs" if cfg.model.recorded else "model.compile"
        yield f"{key}=true works with one actor rank. Use actor.fsdp.size=1, or {key}=false."


def slot_problems(split: TrainSplit, size: int, launcher: LauncherSettings) -> Iterator[str]:
    """Yield errors if the number of slots does not fit the group size or the launcher, with the fix."""
    slots = split.total_num_envs
    if slots % size:
        near = [n for n in ((slots // size) * size, (slots // size + 1) * size) if n]
        best = min((g for g in range(1, slots + 1) if slots % g == 0), key=lambda g: (abs(g - size), g))
        yield (
            f"env.train.total_num_envs={slots} is not divisible by algorithm.group_size={size}: every group needs a "
            f"slot for each member. Use env.train.total_num_envs={' or '.join(map(str, near))}, "
            f"or algorithm.group_size={best}."
        )
    elif size > 1 and not split.use_fixed_reset_state_ids:
        yield (
            f"algorithm.group_size={size} compares episodes from one initial state, so it needs "
            "env.train.use_fixed_reset_state_ids=true."
        )
    workers = launcher.env_workers if isinstance(launcher, ProcessSettings) else "auto"
    if workers != "auto" and workers > slots:
        yield (
            f"launcher.env_workers={workers} but only env.train.total_num_envs={slots} slots: some workers would idle. "
            f"Use launcher.env_workers={slots}."
        )


def staleness_problems(lag: int, fsdp: FsdpSettings, mode: RolloutMode, *, deterministic: bool) -> Iterator[str]:
    """Yield an error, with its fix, for each setting that asynchronous rollouts do not support."""
    if lag and deterministic:
        yield (
            f"algorithm.max_staleness={lag}: the weights of an asynchronous rollout depend on timing, so "
            "runner.deterministic=true is impossible. Remove one of the two keys."
        )
    if lag and (fsdp.size > 1 or fsdp.cpu_offload) and mode is RolloutMode.collocated:
        yield (
            f"algorithm.max_staleness={lag} samples actions during updates, which needs one actor rank without "
            "offloading. Use rollout.mode=disaggregated, or actor.fsdp.size=1 and actor.fsdp.cpu_offload=false."
        )


def check_components(cfg: Config) -> None:
    """Run the checks of the environment, the policy and other components, and raise all their errors together.

    Raises:
        CheckpointError: `algorithm.reference_path` has no weights.
        ConfigError: problems reported by a component, and missing keys of the command; one line each.
    """
    problems = [*get_reads(cfg.command).problems(cfg)]
    if cfg.has("dagger"):
        problems += name_problems("dagger.expert", [cfg.dagger.expert], find_expert)
    if cfg.has("runner"):
        problems += missing_loggers(cfg.runner.logger.backends)
    if cfg.trains and cfg.algorithm.reference_path is not None:
        resolve_weights(str(cfg.algorithm.reference_path), "algorithm.reference_path")
    if cfg.has("model"):
        problems += POLICIES.get(cfg.model.model_type).validate(cfg.model)
    if cfg.has("env"):
        if isinstance(getattr(cfg, "reward", None), StepRewardSettings):
            problems += reward_problems(cfg.reward)
        factory = ENVS.get(cfg.env.env_type)
        if cfg.reads_rows and cfg.acts:
            problems += text_problems(cfg)
        problems += factory.validate(cfg.env)
    if problems:
        raise ConfigError(problems)


def key_problems(cfg: Config, policy: PolicySpec) -> list[str]:
    """Return an error for each key that the policy does not support."""
    factory = POLICIES.get(cfg.model.model_type)
    if hasattr(factory, "run_problems"):
        return factory.run_problems(cfg, policy)
    if ActionKind.text in policy.action_kinds:
        return []
    for name in cfg.changed:
        if name in _INERT:
            log.warning("warning: %s has no effect: model '%s' chooses actions, not text.", name, policy.name)
    return [
        f"{name}: for text policies only; model '{policy.name}' outputs actions. Remove the key."
        for name in _TEXT_ONLY
        if name in cfg.changed
    ]
