"""Config of every command: its sections, and the selection of their settings classes."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from pydantic import PrivateAttr

from embodyrl.algorithms.protocol import ADVANTAGES, LOSSES
from embodyrl.algorithms.settings import AlgorithmSettings, InferenceAlgorithm
from embodyrl.cluster import LAUNCHERS
from embodyrl.cluster.protocol import ClusterSettings, FaultSettings, LauncherSettings
from embodyrl.config.compose import COMMAND_LINE
from embodyrl.config.paths import HUB_NAME
from embodyrl.config.settings import Index, Key, Path, Settings, format_value, get_keys, get_parents, to_builtin
from embodyrl.config.shared import Precision
from embodyrl.data.settings import CollectSettings, DaggerSettings, DemonstrationSettings, ObjectiveSettings
from embodyrl.devices import supports_bfloat16
from embodyrl.envs import ENVS
from embodyrl.envs.reward import StepRewardSettings
from embodyrl.envs.settings import EnvSettings
from embodyrl.envs.video import VideoSettings
from embodyrl.errors import ConfigError
from embodyrl.learners.settings import ActorSettings, CriticSettings
from embodyrl.plan.command_sections import get_command_sections, uses_section
from embodyrl.plan.settings import CheckpointSettings, EvalSettings, RolloutSettings, RunnerSettings, VideoChoice
from embodyrl.policies import POLICIES
from embodyrl.policies.remote.settings import ServeSettings
from embodyrl.policies.settings import ModelSettings
from embodyrl.registry import Registry
from embodyrl.text.dataset import contains_text_rows
from embodyrl.text.rewards.settings import TextRewardSettings
from embodyrl.text.settings import PairSettings, RowSettings

THIS_HOST = "this host"
"""Source label of defaults that depend on the host."""


@dataclass(frozen=True)
class Schema:
    """Keys of a command's config: the settings class of each section, chosen by names in the config."""

    command: str
    sections: Mapping[str, type[Settings]]
    """Settings class of each section that the command uses, by name."""
    loss: type[Settings] = Settings
    """Settings class of the policy loss, whose keys are part of the section `algorithm`."""

    @functools.cached_property
    def keys(self) -> dict[str, Key]:
        """All keys by dotted name."""
        keys_by_name = {name: key for name, key in get_keys(TopSettings).items() if uses_section(self.command, name)}
        for section, kind in self.sections.items():
            keys_by_name |= get_keys(kind, f"{section}.")
        return keys_by_name | (get_keys(self.loss, "algorithm.") if "algorithm" in self.sections else {})

    @functools.cached_property
    def branches(self) -> frozenset[str]:
        """Dotted names of all sections, for example `env` and `env.train`."""
        return frozenset(name for key in self.keys for name in get_parents(key))


class TopSettings(Settings):
    """Config keys without a section."""

    seed: Index = 0
    """Seed from which all random streams of the run are derived."""
    trust: bool = False
    """Trust the config of the run that is resumed or whose weights are used: allow its code (package.module:attr) and
    servers, and programs of the hub (env.id=owner/name@commit). Valid on the command line only."""
    ckpt: Path | None = None
    """Initial weights: a run, a checkpoint folder, or assets/<name>. The config of a run becomes the base of this
    config; command-line groups and keys override its values."""
    video: VideoChoice = "none"
    """Episodes to record: none, failures, first:N, all, or changed:N (N episodes before and after training, preferably
    episodes whose outcome changed)."""


class Config(TopSettings):
    """Config of a command. Sections that the command does not use are None (see `has`)."""

    model: ModelSettings
    runner: RunnerSettings
    launcher: LauncherSettings
    cluster: ClusterSettings
    actor: ActorSettings
    faults: FaultSettings
    env: EnvSettings
    algorithm: AlgorithmSettings
    rollout: RolloutSettings
    eval: EvalSettings
    video_cfg: VideoSettings
    critic: CriticSettings
    checkpoint: CheckpointSettings
    data: DemonstrationSettings | RowSettings | PairSettings
    reward: TextRewardSettings | StepRewardSettings
    collect: CollectSettings
    dagger: DaggerSettings
    objective: ObjectiveSettings
    serve: ServeSettings

    # Private, so that it is not a key, is not written to files and does not make two equal configs different.
    _schema: Schema = PrivateAttr()
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _warnings: list[str] = PrivateAttr(default_factory=list)

    @classmethod
    def build(cls, schema: Schema, values: Mapping[str, Any]) -> Config:
        """Return the config with the given validated sections and keys without a section; other fields are None."""
        cfg = cls.model_construct(**{name: values.get(name) for name in cls.model_fields})
        cfg._schema = schema
        return cfg

    def used_fields(self) -> Iterable[str]:
        """Return the names of the sections and of the keys without a section that the command uses."""
        schema = self._schema
        return [name for name in type(self).model_fields if name in schema.sections or name in schema.keys]

    def updated(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with the given values, by dotted key; the values are not validated.

        Raises:
            ConfigError: the command does not use a key.
        """
        used_keys = {*self.used_fields()}
        if unused := next((name for name in values if name.partition(".")[0] not in used_keys), None):
            raise ConfigError(f"The config of `embodyrl {self.command}` has no key '{unused}'.")
        return super().updated(values)

    @property
    def schema(self) -> Schema:
        """Settings classes of the sections."""
        return self._schema

    @property
    def command(self) -> str:
        """Name of the command."""
        return self._schema.command

    @property
    def sources(self) -> Mapping[str, str]:
        """Source of each value by key, a file or `COMMAND_LINE`; keys with default values are absent."""
        return self._sources

    @property
    def demonstrations(self) -> DemonstrationSettings:
        """Section `data` of commands that read demonstrations."""
        assert isinstance(self.data, DemonstrationSettings)
        return self.data

    @property
    def rows(self) -> RowSettings:
        """Section `data` of commands that read rows of text."""
        assert isinstance(self.data, RowSettings)
        return self.data

    @property
    def is_train_command(self) -> bool:
        """True for the command `train`."""
        return self.command == "train"

    @property
    def has_rollouts(self) -> bool:
        """True if the command has rollouts."""
        return self.has("rollout")

    @property
    def has_evaluations(self) -> bool:
        """True for the command `eval`, and for `train`, which also validates."""
        return self.command in ("train", "eval")

    @property
    def reads_rows(self) -> bool:
        """True if the environment is a text task, with rows in `data` and reward functions in `reward`."""
        return self.has("env") and getattr(ENVS.get(self.env.env_type), "reads_rows", False)

    @property
    def chunk_steps(self) -> int:
        """Number of env steps per chunk; the first chunk of an episode may have more."""
        return max(1, self.model.num_action_chunks - self.env.delay[1])

    @property
    def rollout_processes(self) -> int:
        """Number of processes that only run inference for rollouts; 0: training processes also run inference."""
        return self.rollout.processes if self.is_train_command else 0

    @property
    def prefers_float32(self) -> bool:
        """True if the model's precision is the default bfloat16, was not set explicitly, and is slow on this host."""
        default = type(self.model).model_fields.get("precision")
        is_chosen = "model.precision" in self.sources or self.has("cluster")
        return default is not None and default.default is Precision.bf16 and not is_chosen and not supports_bfloat16()

    @property
    def warnings(self) -> tuple[str, ...]:
        """One warning for each command-line key without effect."""
        return tuple(self._warnings)

    @property
    def changed(self) -> list[str]:
        """Command-line keys whose value differs from the default."""
        keys = self._schema.keys
        return [
            name
            for name, value in self.leaves()
            if self.is_set_by_user(name) and to_builtin(value) != to_builtin(keys[name].default)
        ]

    @property
    def conditions(self) -> dict[str, str]:
        """{condition: keys} for the conditions that involve several sections (see `Settings.keys_by_condition`)."""
        keys_by_condition = {
            "reward.path=null or reward.mode=add": "env.use_rel_reward",
            **get_command_sections(self.command).keys_by_condition,
        }
        return keys_by_condition | (_TEXT_CONDITIONS if self.has("env") and self.env.max_chunks else {})

    @property
    def programs(self) -> dict[str, str]:
        """Hub repositories (owner/name@revision) whose code the environment runs, by key."""
        values = {name: getattr(self.env, name) for name in self.env.program_keys} if self.has("env") else {}
        return {
            f"env.{name}": value
            for name, value in values.items()
            if isinstance(value, str) and "@" in value and HUB_NAME.fullmatch(value)
        }

    def add_sources(self, sources: Mapping[str, str] = MappingProxyType({}), warnings: Iterable[str] = ()) -> None:
        """Add sources of values, by key, and warnings, while the config is loaded."""
        self._sources.update(sources)
        self._warnings += warnings

    def has(self, section: str) -> bool:
        """Return True if the command uses a section."""
        return section in self._schema.sections

    def is_set_by_user(self, name: str) -> bool:
        """Return True if this key, or a subkey, is set on the command line."""
        return any(by == COMMAND_LINE and f"{key}.".startswith(f"{name}.") for key, by in self._sources.items())


def get_selectors(command: str) -> dict[str, str]:
    """Return, by group, the key that selects the settings class; groups with a fixed class are not included."""
    sections = get_command_sections(command).sections.split()
    # Only training needs the keys of one algorithm; other commands use `InferenceAlgorithm`.
    return {
        group: key
        for group, key in SELECTORS.items()
        if group in sections and (group != "algorithm" or "critic" in sections)
    }


def choose_classes(command: str, values: Mapping[str, Any], problems: list[str]) -> tuple[Schema, frozenset[str]]:
    """Return the settings classes for the chosen components, and the groups with an invalid component."""
    sections = {name: kinds[0] for name, kinds in get_section_classes().items() if uses_section(command, name)}
    selectors, components = get_selectors(command), dict[str, Any]()
    loss, invalid_groups = Settings, set[str]()
    for group, key in selectors.items():
        try:
            name = _get_component_name(values, f"{group}.{key}")
            if group == "algorithm":
                loss_type = _get_component_name(values, "algorithm.loss_type")
                sections[group], loss = get_algorithm_settings(name, loss_type)
            else:
                components[group] = REGISTRIES[group][0].get(name)
                sections[group] = components[group].settings
        except ConfigError as error:
            problems += error.problems
            invalid_groups.add(group)
    if "algorithm" in sections and "algorithm" not in selectors:
        sections["algorithm"] = InferenceAlgorithm
    if getattr(components.get("env"), "reads_rows", False):
        sections |= {"data": RowSettings, "reward": TextRewardSettings}
    elif getattr(components.get("env"), "rewards_steps", False) and uses_section(command, "rollout"):
        sections["reward"] = StepRewardSettings
    if command == "sft":
        sections["data"] = _choose_data_class(values)
    if "launcher" in components and components["launcher"].spans_hosts:
        sections["cluster"] = ClusterSettings
    order = {name: sections[name] for name in Config.model_fields if name in sections}
    return Schema(command=command, sections=order, loss=loss), frozenset(invalid_groups)


def _choose_data_class(values: Mapping[str, Any]) -> type[Settings]:
    """Return the settings class of `data` for SFT, which depends on the content of `data.path`."""
    if not contains_text_rows(str(values.get("data.path", ""))):
        return DemonstrationSettings
    return PairSettings if values.get("objective.name") in ("dpo", "preference") else RowSettings


@functools.cache
def get_section_classes() -> dict[str, tuple[type[Settings], ...]]:
    """Return the settings classes of each section, the most general class first, except classes of components."""
    hints: dict[str, Any] = {name: info.annotation for name, info in Config.model_fields.items()}
    sections = [name for name in hints if name not in TopSettings.model_fields]
    return {name: typing.get_args(hints[name]) or (hints[name],) for name in sections}


def _get_component_name(values: Mapping[str, Any], key: str) -> str:
    """Return the value of a key that names a component.

    Raises:
        ConfigError: the value is not a name.
    """
    value = values.get(key, _DEFAULT_NAMES.get(key))
    if not isinstance(value, str):
        raise ConfigError(f"{key}={format_value(value):.200} must be a name or package.module:attr.")
    return value


def get_algorithm_settings(adv_type: str, loss_type: str) -> tuple[type[AlgorithmSettings], type[Settings]]:
    """Return the settings classes of an estimator and of a policy loss.

    Raises:
        UnknownNameError: no such estimator or loss.
    """
    estimator, loss = ADVANTAGES.get(adv_type), LOSSES.get(loss_type)
    return estimator.settings, Settings if estimator.needs_replay else loss.settings


SELECTORS = {"env": "env_type", "model": "model_type", "launcher": "name", "algorithm": "adv_type"}
"""Groups of keys whose settings class depends on a component, each with the key that names the component."""
REGISTRIES: dict[str, tuple[Registry[Any], ...]] = {
    "env": (ENVS,),
    "model": (POLICIES,),
    "launcher": (LAUNCHERS,),
    "algorithm": (ADVANTAGES, LOSSES),
}
"""Registries of the components of each group."""
_DEFAULT_NAMES = {"launcher.name": "local", "algorithm.adv_type": "grpo", "algorithm.loss_type": "ppo_clip"}

_TEXT_CONDITIONS = {
    "never: a conversation has at most env.max_turns replies": "env.train.max_episode_steps "
    "env.eval.max_episode_steps env.train.ignore_terminations env.eval.ignore_terminations",
    "never: a conversation has no images": "video",
    "algorithm.sampling_params.max_new_tokens=null": "model.num_action_chunks",
}
"""Conditions under which keys have an effect in conversations (see `Settings.keys_by_condition`)."""
