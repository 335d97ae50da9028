"""What each command reads: one root of settings a command, completed by the parts that were chosen."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import Field, PrivateAttr, create_model

from embodyrl.algorithms.protocol import ADVANTAGES, LOSSES, algorithm_settings
from embodyrl.algorithms.settings import ActingAlgorithm, AlgorithmSettings
from embodyrl.cluster import LAUNCHERS
from embodyrl.cluster.protocol import ClusterSection, LauncherSettings
from embodyrl.cluster.settings import ActingFaults, StepTimeout
from embodyrl.config.placement import parse_placement
from embodyrl.config.settings import Index, Key, Path, Settings, join, keys_of, parents_of, spell
from embodyrl.datasets.settings import DataSettings, DemonstrationSettings, RowSettings
from embodyrl.datasets.text import holds_text
from embodyrl.envs import ENVS
from embodyrl.envs.reward import RewardSection
from embodyrl.envs.settings import CheckedEnv, CollectEnv, EnvSettings, EvalEnv, TrainEnv
from embodyrl.envs.video import FilmSettings, VideoSettings
from embodyrl.errors import ConfigError
from embodyrl.plan.settings import (
    ActingRolloutSettings,
    ActingRunSettings,
    CheckpointSettings,
    CollectSettings,
    DaggerSettings,
    EvalSettings,
    FaultSettings,
    LearnedRunSettings,
    MeasuredRunSettings,
    RecordedSettings,
    RolloutSettings,
    RunnerSettings,
    ServeSettings,
    SupervisedFaults,
    SupervisedRunSettings,
    VideoChoice,
)
from embodyrl.plan.slots import slot_problems, staleness_problems
from embodyrl.policies import POLICIES
from embodyrl.policies.settings import ModelSettings
from embodyrl.registry import Registry, closest
from embodyrl.rewards.settings import JudgeSettings
from embodyrl.workers.settings import ActingSettings, ActorSettings, LearnedActorSettings, SupervisedActorSettings

R = TypeVar("R", bound="Root")


class Root(Settings):
    """What every command has."""

    seed: Index = 0
    """The one seed; every random stream is derived from it."""

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def sources(self) -> Mapping[str, str]:
        """Where each value came from, a file or `load.COMMAND_LINE`; absent: the default."""
        return self._sources


class CheckConfig(Root):
    """`embodyrl check-env`."""

    env: CheckedEnv
    faults: StepTimeout = StepTimeout()


class PolicyConfig(Root):
    """A command that uses a policy."""

    trust: bool = False
    """The config of the run that is resumed or whose weights are used may name code (package.module:attr) and servers;
    counts only where it is typed."""
    model: ModelSettings


class RunConfig(PolicyConfig):
    """A command that makes a run folder."""

    runner: Any


class ActingConfig(RunConfig):
    """A command in which a policy plays episodes."""

    ckpt: Path | None = None
    """Weights to start from: a run, a checkpoint folder, or assets/<name>."""
    runner: ActingRunSettings = ActingRunSettings()
    launcher: LauncherSettings
    env: EnvSettings
    algorithm: ActingAlgorithm = ActingAlgorithm()
    rollout: ActingRolloutSettings = ActingRolloutSettings()
    actor: ActingSettings = ActingSettings()
    faults: ActingFaults = ActingFaults()
    video_cfg: FilmSettings = FilmSettings()

    def problems(self) -> Iterator[str]:
        """Say which hosts do not exist."""
        yield from super().problems()
        cluster = getattr(self, "cluster", None)
        if cluster is not None:
            try:
                apart = self.rollout.acting_processes > 0
                parse_placement(cluster.component_placement, cluster.num_nodes, apart=apart)
            except ConfigError as error:
                yield str(error)


class CollectConfig(ActingConfig):
    """`embodyrl collect`."""

    env: CollectEnv
    algorithm: ActingAlgorithm = ActingAlgorithm()
    eval: RecordedSettings = RecordedSettings()
    collect: CollectSettings = CollectSettings()


class EvalConfig(ActingConfig):
    """`embodyrl eval`."""

    runner: MeasuredRunSettings = MeasuredRunSettings()
    env: EvalEnv
    algorithm: ActingAlgorithm = ActingAlgorithm()
    eval: EvalSettings = EvalSettings()
    video: VideoChoice = "none"
    """none, failures, first:N or all."""
    video_cfg: VideoSettings = VideoSettings()


class TrainConfig(EvalConfig):
    """`embodyrl train`."""

    runner: RunnerSettings = RunnerSettings()
    env: TrainEnv
    algorithm: AlgorithmSettings = AlgorithmSettings()
    rollout: RolloutSettings = RolloutSettings()
    actor: ActorSettings = ActorSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    faults: FaultSettings = FaultSettings()

    def problems(self) -> Iterator[str]:
        """Say what does not fit together, one line each with the fix."""
        yield from super().problems()
        yield from slot_problems(self.env.train, self.algorithm.group_size, self.launcher)
        lag, certain = self.algorithm.max_staleness, self.runner.deterministic
        yield from staleness_problems(lag, self.actor.fsdp, self.rollout.mode, deterministic=certain)
        yield from _ranks(self)
        if self.runner.resume_dir is not None and self.ckpt is not None:
            yield (
                f"ckpt={self.ckpt} and runner.resume_dir={self.runner.resume_dir}: a resumed run has weights of its "
                "own. Use one of them."
            )


class SftConfig(RunConfig):
    """`embodyrl sft`."""

    runner: SupervisedRunSettings = SupervisedRunSettings()
    launcher: LauncherSettings
    data: DataSettings = DataSettings()
    actor: SupervisedActorSettings = SupervisedActorSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    faults: SupervisedFaults = SupervisedFaults()

    def problems(self) -> Iterator[str]:
        """Say which ranks there cannot be."""
        return _ranks(self)

    def idle(self) -> Iterator[tuple[str, str]]:
        """Name what is about simulators."""
        yield "launcher.env_workers", "supervised training runs no simulators"


class ServeConfig(PolicyConfig):
    """`embodyrl serve`."""

    ckpt: Path | None = None
    """Weights to serve: a run, a checkpoint folder, or assets/<name>; default: the model's own."""
    env: EnvSettings
    serve: ServeSettings = ServeSettings()


class DaggerConfig(CollectConfig, SftConfig):
    """`embodyrl dagger`: what collecting and supervised training read."""

    runner: LearnedRunSettings = LearnedRunSettings()
    data: DemonstrationSettings = DemonstrationSettings()
    actor: LearnedActorSettings = LearnedActorSettings()
    faults: FaultSettings = FaultSettings()
    dagger: DaggerSettings = DaggerSettings()

    def idle(self) -> Iterator[tuple[str, str]]:
        """Name what every round sets."""
        yield "collect.labels", "the expert labels in every round"
        yield "collect.filter", "failures are labelled too"
        yield "runner.resume_dir", "the same command goes on with the first round that is not complete"


class TextTask(Settings):
    """What an environment of rows brings along."""

    data: RowSettings = RowSettings()
    reward: JudgeSettings = JudgeSettings()


ROOTS: dict[str, type[Root]] = {
    "train": TrainConfig,
    "eval": EvalConfig,
    "collect": CollectConfig,
    "sft": SftConfig,
    "serve": ServeConfig,
    "dagger": DaggerConfig,
    "check-env": CheckConfig,
}


def _env(values: Mapping[str, Any]) -> type[Settings]:
    return ENVS.get(_name(values, "env.env_type")).settings


def _model(values: Mapping[str, Any]) -> type[Settings]:
    return POLICIES.get(_name(values, "model.model_type")).settings


def _launcher(values: Mapping[str, Any]) -> type[Settings]:
    return LAUNCHERS.get(_name(values, "launcher.name", "local")).settings


def _algorithm(values: Mapping[str, Any]) -> type[Settings]:
    adv_type = _name(values, "algorithm.adv_type", "grpo")
    return algorithm_settings(adv_type, _name(values, "algorithm.loss_type", "ppo_clip"))


def _data(values: Mapping[str, Any]) -> type[Settings]:
    return RowSettings if holds_text(str(values.get("data.path", ""))) else DemonstrationSettings


SELECTORS: dict[str, tuple[str, Callable[[Mapping[str, Any]], type[Settings]]]] = {
    "env": ("env_type", _env),
    "model": ("model_type", _model),
    "launcher": ("name", _launcher),
    "algorithm": ("adv_type", _algorithm),
    "data": ("path", _data),
}
"""Groups whose keys depend on a choice: the key that chooses, and the class of the keys that come with the choice."""


def _name(values: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = values.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{key}={spell(value)}: must be a name or package.module:attr.")
    return value


@dataclass(frozen=True, slots=True)
class CommandKeys:
    """The keys of a command; implements `KeyTree`."""

    command: str

    def choose(self, values: Mapping[str, Any], problems: list[str]) -> tuple[type[Root], frozenset[str]]:
        """See `KeyTree.choose`."""
        root, fields, unclear = ROOTS[self.command], {}, set()
        for group, (_, settings) in SELECTORS.items():
            base = selected(root, group)
            if base is None:
                continue
            try:
                fields[group] = join(settings(values), base)
            except ConfigError as error:
                problems += error.problems
                unclear.add(group)
        bases: list[type[Settings]] = [root]
        factory = ENVS.get(values["env.env_type"]) if "env" in fields else None
        if getattr(factory, "reads_rows", False):
            bases.insert(0, TextTask)
        elif issubclass(root, ActingConfig) and (section := getattr(factory, "section", None)):
            bases.insert(0, section)
        if "launcher" in fields and (section := LAUNCHERS.get(_name(values, "launcher.name", "local")).section):
            bases.insert(0, section)
        return _complete(tuple(bases), tuple(fields.items())), frozenset(unclear)

    def is_known(self, name: str) -> bool:
        """See `KeyTree.is_known`."""
        return is_known(name)

    def suggest(self, name: str) -> str:
        """See `KeyTree.suggest`."""
        return suggest(name)

    def reader(self, name: str, values: Mapping[str, Any]) -> str:
        """See `KeyTree.reader`."""
        root, group = ROOTS[self.command], name.partition(".")[0]
        if group in TextTask.model_fields and selected(root, "env"):
            group = "env"  # whose kind decides whether there are rows
        if selected(root, group) is None:
            return f"`embodyrl {self.command}`"
        keys = ("adv_type", "loss_type") if group == "algorithm" else (SELECTORS[group][0],)
        return " with ".join(f"{key} '{values.get(f'{group}.{key}')}'" for key in keys)


def selected(root: type[Root], group: str) -> Any:
    """The class below a group whose keys depend on a choice that the command reads; None: it does not."""
    info, selector = root.model_fields.get(group), SELECTORS.get(group)
    kind = info.annotation if info else None
    return kind if selector and selector[0] in getattr(kind, "model_fields", {}) else None


@functools.cache
def _complete(bases: tuple[type[Settings], ...], fields: tuple[tuple[str, type[Settings]], ...]) -> type[Root]:
    given = {name: (kind, Field(default_factory=kind)) for name, kind in fields}
    return create_model(bases[-1].__name__, __base__=bases, **given)  # type: ignore[call-overload]


@functools.cache
def all_keys() -> Mapping[str, Key]:
    """Every key of every command with any registered part, by dotted name."""
    groups = dict.fromkeys(name for section in _SECTIONS for name in section.model_fields)
    return {name: key for group in groups for name, key in keys_below(group).items()}


@functools.cache
def keys_below(group: str) -> Mapping[str, Key]:
    """The keys of one group (or the one key of that name), whatever the command and the parts."""
    found: dict[str, Key] = {}
    for section in _SECTIONS:
        found |= {name: key for name, key in keys_of(section).items() if name.partition(".")[0] == group}
    for registry in _PARTS.get(group, ()):
        for part in _installed(registry):
            found |= keys_of(part.settings, f"{group}.")
    return found | (keys_of(DemonstrationSettings, "data.") if group == "data" else {})


_SECTIONS: tuple[type[Settings], ...] = (*ROOTS.values(), RewardSection, TextTask, ClusterSection)
_PARTS = {"env": (ENVS,), "model": (POLICIES,), "launcher": (LAUNCHERS,), "algorithm": (ADVANTAGES, LOSSES)}


def _installed(registry: Registry[Any]) -> Iterator[Any]:
    for name in registry.names():
        # A part may need a package that is not there, or is damaged.
        with contextlib.suppress(ConfigError, ImportError):
            yield registry.get(name)


_RETIRED = frozenset(
    {
        *("custom", "rollout.enable_offload", "actor.enable_offload", "env.train.enable_offload"),
        *("env.eval.enable_offload", "algorithm.sampling_params.do_sample", "env.eval.auto_reset"),
        *("env.eval.use_fixed_reset_state_ids", "env.eval.max_steps_per_rollout_epoch", "eval.standard"),
    }
)
"""Keys of earlier versions that never did anything; runs of those versions have them in their config.yaml."""


def is_known(name: str) -> bool:
    """Whether some command with some part reads this key, or one below or above it."""
    known = keys_below(name.partition(".")[0])
    inner = any(key.startswith(f"{name}.") for key in known)
    above = any(p in _RETIRED or (p in known and known[p].free) for p in parents_of(name))
    return name in known or inner or above or name in _RETIRED


def suggest(name: str) -> str:
    """Return " Did you mean '...'?" for an unknown key: a slip, the same last part elsewhere, the nearest spelling."""
    if slip := closest(name, _with_parents(keys_below(name.partition(".")[0])), cutoff=0.9):
        return slip
    names, tail = _with_parents(all_keys()), name.rpartition(".")[2]
    if same := [n for n in names if n.rpartition(".")[2] == tail]:
        return closest(name, same, cutoff=0.0)
    if nearest := closest(name, names, cutoff=0.75):
        return nearest
    if word := closest(tail, {n.rpartition(".")[2] for n in names}, cutoff=0.75):
        return closest(name, [n for n in names if n.rpartition(".")[2] == word.split("'")[1]], cutoff=0.0)
    return closest(name, names)


def _with_parents(keys: Mapping[str, Key]) -> list[str]:
    return [*keys, *{parent for key in keys for parent in parents_of(key)}]


def _ranks(cfg: TrainConfig | SftConfig) -> Iterator[str]:
    size = cfg.actor.fsdp.size
    if size > 1 and LAUNCHERS.get(cfg.launcher.name).in_process:
        yield f"actor.fsdp.size={size}: launcher={cfg.launcher.name} has one process; use launcher=local or one rank."
    elif size > 1 and isinstance(cfg, TrainConfig) and cfg.rollout.backend != "hf" and not cfg.rollout.acting_processes:
        yield (
            f"rollout.backend={cfg.rollout.backend} generates with one actor rank. Use actor.fsdp.size=1, "
            "rollout.mode=disaggregated, or rollout.backend=hf."
        )
    elif size > 1 and cfg.model.compiled:
        yield "model.compile=true works with one actor rank. Use actor.fsdp.size=1, or model.compile=false."
