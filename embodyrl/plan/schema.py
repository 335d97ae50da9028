"""The config of all commands: its sections, the commands that use each section, and the choice of its class."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, PrivateAttr, create_model

from embodyrl.algorithms.protocol import ADVANTAGES, LOSSES
from embodyrl.algorithms.settings import ActingAlgorithm, AlgorithmSettings
from embodyrl.cluster import LAUNCHERS
from embodyrl.cluster.protocol import FaultSettings, LauncherSettings
from embodyrl.config.compose import COMMAND_LINE
from embodyrl.config.paths import HUB_NAME
from embodyrl.config.sections import Chosen, Section
from embodyrl.config.settings import Index, Path, Settings, keys_of, leaves, plain, spell
from embodyrl.config.shared import Precision
from embodyrl.devices import multiplies_bfloat16
from embodyrl.envs import ENVS
from embodyrl.envs.settings import EnvSettings
from embodyrl.envs.video import VideoSettings
from embodyrl.errors import ConfigError
from embodyrl.learners.settings import ActorSettings, CriticSettings
from embodyrl.plan.reads import get_reads, reads
from embodyrl.plan.settings import CheckpointSettings, EvalSettings, RolloutSettings, RunnerSettings, VideoChoice
from embodyrl.policies import POLICIES
from embodyrl.policies.settings import ModelSettings

THIS_HOST = "this host"
"""Source label of defaults that depend on the host."""


class Config(Settings):
    """Config of a command, with all sections of the core. Sections that the command does not use are None."""

    command: ClassVar[str] = ""

    seed: Index = 0
    """Seed from which all random streams of the run are derived."""
    trust: bool = False
    """Trust the config of the run that is resumed or whose weights are used: allow its code (package.module:attr) and
    servers, and programs of the hub (env.id=owner/name@commit). Valid on the command line only."""
    model: ModelSettings
    runner: RunnerSettings = RunnerSettings()
    launcher: LauncherSettings
    actor: ActorSettings = ActorSettings()
    faults: FaultSettings = FaultSettings()
    ckpt: Path | None = None
    """Initial weights: a run, a checkpoint folder, or assets/<name>. The config of a run becomes the base of this
    config; command-line groups and keys override its values."""
    env: EnvSettings
    algorithm: AlgorithmSettings = AlgorithmSettings()
    rollout: RolloutSettings = RolloutSettings()
    eval: EvalSettings = EvalSettings()
    video_cfg: VideoSettings = VideoSettings()
    video: VideoChoice = "none"
    """Episodes to record: none, failures, first:N, all, or changed:N (N episodes before and after training, preferably
    episodes whose outcome changed)."""
    critic: CriticSettings = CriticSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a section whose class depends on the command or on other values."""

    # Private, so that it is not a key, is not written to files and does not make two equal configs different.
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _warnings: list[str] = PrivateAttr(default_factory=list)

    @property
    def sources(self) -> Mapping[str, str]:
        """Source of each value by key, a file or `COMMAND_LINE`; keys with default values are absent."""
        return self._sources

    @property
    def trains(self) -> bool:
        """True for the command `train`."""
        return self.command == "train"

    @property
    def acts(self) -> bool:
        """True if the command has rollouts."""
        return self.has("rollout")

    @property
    def evaluates(self) -> bool:
        """True for the command `eval`, and for `train`, which also validates."""
        return self.has("video")

    @property
    def reads_rows(self) -> bool:
        """True if the environment is a text task, with rows in `data` and reward functions in `reward`."""
        return self.has("env") and getattr(ENVS.get(self.env.env_type), "reads_rows", False)

    @property
    def chunk_overlap(self) -> int:
        """Number of actions at the end of a chunk that the next chunk replaces."""
        overlap = self.rollout.chunk_overlap if self.has("rollout") else None
        return self.env.delay[1] if overlap is None else overlap

    @property
    def chunk_steps(self) -> int:
        """Number of env steps per chunk; the first chunk of an episode may have more."""
        return max(1, self.model.num_action_chunks - self.chunk_overlap)

    @property
    def acting_processes(self) -> int:
        """Number of processes that only run inference for rollouts; 0: training processes also act."""
        return self.rollout.acting_processes if self.trains else 0

    @property
    def prefers_float32(self) -> bool:
        """True if the model's precision is the default bfloat16, was not set explicitly, and is slow on this host."""
        default = type(self.model).model_fields.get("precision")
        chosen = "model.precision" in self.sources or self.has("cluster")
        return default is not None and default.default is Precision.bf16 and not chosen and not multiplies_bfloat16()

    @property
    def warnings(self) -> tuple[str, ...]:
        """One warning for each command-line key without effect."""
        return tuple(self._warnings)

    @property
    def changed(self) -> list[str]:
        """Command-line keys whose value differs from the default."""
        keys = keys_of(type(self))
        return [n for n, value in leaves(self) if self.typed(n) and plain(value) != plain(keys[n].default)]

    @property
    def added(self) -> dict[str, Section]:
        """Sections of this config whose class depends on the command or on other values, by name."""
        found = sections().items()
        return {name: one for name, one in found if self.has(name) and isinstance(getattr(self, name), one.kinds)}

    @property
    def conditions(self) -> dict[str, str]:
        """{condition: keys} for the conditions that involve several sections (see `Settings.needs`)."""
        found = {"reward.path=null or reward.mode=add": "env.use_rel_reward", **get_reads(self.command).needs}
        for section in self.added.values():
            found |= section.needs
        return found

    @property
    def programs(self) -> dict[str, str]:
        """Hub repositories (owner/name@revision) whose code the environment runs, by key."""
        values = {name: getattr(self.env, name) for name in self.env.program_keys} if self.has("env") else {}
        return {
            f"env.{name}": value
            for name, value in values.items()
            if isinstance(value, str) and "@" in value and HUB_NAME.fullmatch(value)
        }

    def note(self, sources: Mapping[str, str] = MappingProxyType({}), warnings: Iterable[str] = ()) -> None:
        """Add sources of values, by key, and warnings, while the config is loaded."""
        self._sources.update(sources)
        self._warnings += warnings

    def has(self, section: str) -> bool:
        """Return True if the command uses a section."""
        return section in type(self).model_fields

    def typed(self, name: str) -> bool:
        """Return True if this key, or a subkey, is set on the command line."""
        return any(by == COMMAND_LINE and f"{key}.".startswith(f"{name}.") for key, by in self._sources.items())


def selectors(command: str) -> dict[str, str]:
    """Return the name of the key that selects the settings class, by group; other groups have a fixed class."""
    read = get_reads(command).sections.split()  # acting alone takes keys that all algorithms have
    return {g: key for g, (key, _) in SELECTORS.items() if g in read and (g != "algorithm" or "critic" in read)}


def choose(command: str, values: Mapping[str, Any], problems: list[str]) -> tuple[type[Config], frozenset[str]]:
    """Return the config class for the chosen components, and the groups with an invalid component."""
    fields: dict[str, tuple[type[Settings], ...]] = {}
    unclear = set()
    for group in selectors(command):
        try:
            fields[group] = SELECTORS[group][1](values)
        except ConfigError as error:
            problems += error.problems
            unclear.add(group)
    factory = ENVS.get(values["env.env_type"]) if "env" in fields else None
    more = dict(getattr(factory, "sections", {})) if reads(command, "rollout") else {}
    chosen = Chosen(command=command, values=values, reads_rows=getattr(factory, "reads_rows", False))
    more |= {name: kind for name, section in sections().items() if (kind := section.choose(chosen)) is not None}
    if "launcher" in fields:
        more |= LAUNCHERS.get(name_of(values, "launcher.name", "local")).sections
    fields |= {name: (kind,) for name, kind in more.items()}
    return config_class(command, tuple(fields.items())), frozenset(unclear)


@functools.cache
def config_class(command: str, fields: tuple[tuple[str, tuple[type[Settings], ...]], ...] = ()) -> type[Config]:
    """Create the config class of a command from the settings classes of its sections (`fields`)."""
    given: dict[str, Any] = {name: (ClassVar[None], None) for name in Config.model_fields if not reads(command, name)}
    if "algorithm" not in selectors(command) and reads(command, "algorithm"):
        given["algorithm"] = (ActingAlgorithm, ActingAlgorithm())
    given |= {name: (kind, Field(default_factory=kind)) for name, (kind, *_) in fields}
    given["command"] = (ClassVar[str], command)
    given["inlined"] = (ClassVar[Any], {name: kinds[1] for name, kinds in fields if len(kinds) > 1})
    return create_model("Config", __base__=Config, __module__=__name__, **given)


def name_of(values: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """Return the value of a key that names a component.

    Raises:
        ConfigError: the value is not a name.
    """
    value = values.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{key}={spell(value):.200} must be a name or package.module:attr.")
    return value


def algorithm_settings(adv_type: str, loss_type: str) -> tuple[type[AlgorithmSettings], type[Settings]]:
    """Return the settings classes of an estimator and of a policy loss.

    Raises:
        UnknownNameError: no such estimator or loss.
    """
    estimator, loss = ADVANTAGES.get(adv_type), LOSSES.get(loss_type)
    return estimator.settings, Settings if estimator.needs_replay else loss.settings


def _algorithm(values: Mapping[str, Any]) -> tuple[type[Settings], ...]:
    adv_type = name_of(values, "algorithm.adv_type", "grpo")
    return algorithm_settings(adv_type, name_of(values, "algorithm.loss_type", "ppo_clip"))


SELECTORS: dict[str, tuple[str, Callable[[Mapping[str, Any]], tuple[type[Settings], ...]]]] = {
    "env": ("env_type", lambda values: (ENVS.get(name_of(values, "env.env_type")).settings,)),
    "model": ("model_type", lambda values: (POLICIES.get(name_of(values, "model.model_type")).settings,)),
    "launcher": ("name", lambda values: (LAUNCHERS.get(name_of(values, "launcher.name", "local")).settings,)),
    "algorithm": ("adv_type", _algorithm),
}
"""Groups of keys whose settings class depends on a component: the key that names the component, and a function that
returns its settings classes. An algorithm has one class for its estimator and one for its loss."""


@functools.cache
def sections() -> Mapping[str, Section]:
    """Return the sections whose settings class depends on the command or on other values, by name."""
    from embodyrl.data.section import SECTION as DATA
    from embodyrl.data.settings import COLLECT, DAGGER, OBJECTIVE
    from embodyrl.policies.remote.settings import SECTION as SERVE
    from embodyrl.text.rewards.section import SECTION as REWARD

    return {
        "collect": COLLECT,
        "dagger": DAGGER,
        "data": DATA,
        "objective": OBJECTIVE,
        "reward": REWARD,
        "serve": SERVE,
    }
