"""Keys of each command: one root of settings per command, completed by the chosen parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import PrivateAttr

from embodyrl.algorithms.protocol import algorithm_settings
from embodyrl.algorithms.settings import (
    ActingAlgorithm,
    AlgorithmSettings,
)
from embodyrl.cluster import LAUNCHERS
from embodyrl.cluster.protocol import FaultSettings, LauncherSettings, parse_placement
from embodyrl.config.sections import SECTIONS, Section
from embodyrl.config.settings import Index, Path, Settings, keys_of, leaves, plain, spell
from embodyrl.config.shared import Precision
from embodyrl.config.words import COMMAND_LINE
from embodyrl.devices import multiplies_bfloat16
from embodyrl.envs import ENVS
from embodyrl.envs.settings import EnvSettings
from embodyrl.envs.video import VideoSettings
from embodyrl.errors import ConfigError
from embodyrl.learners.settings import ActorSettings, CriticSettings
from embodyrl.plan.contradictions import slot_problems, staleness_problems
from embodyrl.plan.settings import (
    CheckpointSettings,
    CollectSettings,
    DaggerSettings,
    EvalSettings,
    RolloutSettings,
    RunnerSettings,
    VideoChoice,
)
from embodyrl.policies import POLICIES
from embodyrl.policies.settings import ModelSettings

R = TypeVar("R", bound="Root")
THIS_HOST = "this host"
"""Source label for defaults that depend on the host."""


class Root(Settings):
    """Settings of every command."""

    dry_run: ClassVar[str] = ""
    """`module:function` that returns the lines of `--dry-run` from the config."""

    seed: Index = 0
    """Random seed; all random streams are derived from it."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a section of an extension."""

    # Private, so that it is no key, is not written to files and does not make two equal configs different.
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _warnings: list[str] = PrivateAttr(default_factory=list)

    @property
    def sources(self) -> Mapping[str, str]:
        """Source of each value, a file or `COMMAND_LINE`; absent: the default."""
        return self._sources

    @property
    def reads_rows(self) -> bool:
        """The environment is a text task, with rows in `data` and a reward function in `reward`."""
        env = getattr(self, "env", None)
        return env is not None and getattr(ENVS.get(env.env_type), "reads_rows", False)

    def problems(self) -> Iterator[str]:
        """Yield contradictions with the sections of extensions."""
        yield from super().problems()
        for section in sections_of(self).values():
            yield from section.problems(self)

    def typed(self, name: str) -> bool:
        """Return whether this key, or a key below it, is set on the command line."""
        return any(by == COMMAND_LINE and f"{key}.".startswith(f"{name}.") for key, by in self._sources.items())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return one line for each typed key that has no effect."""
        return tuple(self._warnings)

    @property
    def changed(self) -> list[str]:
        """Keys that were typed with another value than the default."""
        keys = keys_of(type(self))
        return [n for n, value in leaves(self) if self.typed(n) and plain(value) != plain(keys[n].default)]


class CheckConfig(Root):
    """`embodyrl check-env`."""

    env: EnvSettings
    faults: FaultSettings = FaultSettings()


class PolicyConfig(Root):
    """A command that uses a policy."""

    trust: bool = False
    """The config of the run that is resumed or whose weights are used may name code (package.module:attr) and servers;
    counts only where it is typed."""
    model: ModelSettings

    @property
    def prefers_float32(self) -> bool:
        """The default of a model is bfloat16, no file and no override sets it, and this host is slow in bfloat16."""
        default = type(self.model).model_fields.get("precision")
        chosen = "model.precision" in self.sources or hasattr(self, "cluster")
        return default is not None and default.default is Precision.bf16 and not chosen and not multiplies_bfloat16()


class RunConfig(PolicyConfig):
    """A command with a run folder."""

    runner: RunnerSettings = RunnerSettings()
    launcher: LauncherSettings
    actor: ActorSettings = ActorSettings()
    faults: FaultSettings = FaultSettings()


class ActingConfig(RunConfig):
    """A command with rollouts."""

    ckpt: Path | None = None
    """Weights to start from: a run, a checkpoint folder, or assets/<name>. The config of that run is the base of this
    config, below typed groups and keys."""
    env: EnvSettings
    algorithm: ActingAlgorithm = ActingAlgorithm()
    rollout: RolloutSettings = RolloutSettings()
    eval: EvalSettings = EvalSettings()
    video_cfg: VideoSettings = VideoSettings()

    @property
    def acting_processes(self) -> int:
        """Number of processes for rollouts only; 0: training processes also act."""
        return 0

    def problems(self) -> Iterator[str]:
        """Yield hosts that do not exist."""
        yield from super().problems()
        # The section exists only with a launcher that brings it along.
        cluster = getattr(self, "cluster", None)
        if cluster is not None:
            try:
                apart = self.acting_processes > 0
                parse_placement(cluster.component_placement, cluster.num_nodes, separate=apart)
            except ConfigError as error:
                yield str(error)


class CollectConfig(ActingConfig):
    """`embodyrl collect`."""

    dry_run = "embodyrl.extensions.demonstrations.collect:collection_facts"

    collect: CollectSettings = CollectSettings()


class EvalConfig(ActingConfig):
    """`embodyrl eval`."""

    dry_run = "embodyrl.commands.dry_run:run_facts"

    video: VideoChoice = "none"
    """none, failures, first:N, all, or changed:N: after training, N episodes before and after it, by outcome."""

    def problems(self) -> Iterator[str]:
        """Yield a comparison of validations in a run without two validations."""
        yield from super().problems()
        changed = self.typed("video") and self.video.startswith("changed:")  # a file serves training as well
        if changed and (not isinstance(self, TrainConfig) or self.runner.only_eval):
            yield f"video={self.video} compares two validations of a training. Use first:N, failures or all."


class TrainConfig(EvalConfig):
    """`embodyrl train`."""

    algorithm: AlgorithmSettings = AlgorithmSettings()
    critic: CriticSettings = CriticSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()

    @property
    def acting_processes(self) -> int:
        """Number of processes for rollouts only; 0: training processes also act."""
        return self.rollout.acting_processes

    def problems(self) -> Iterator[str]:
        """Yield contradictions between settings, one line each with the fix."""
        yield from super().problems()
        yield from slot_problems(self.env.train, self.algorithm.group_size, self.launcher)
        lag, certain = self.algorithm.max_staleness, self.runner.deterministic
        yield from staleness_problems(lag, self.actor.fsdp, self.rollout.mode, deterministic=certain)
        yield from _ranks(self)
        if self.algorithm.curriculum and lag:
            yield "algorithm.curriculum needs the outcomes of the previous step; set algorithm.max_staleness=0."
        if self.critic.path is not None and (certain or self.actor.fsdp.size > 1):
            yield (
                "critic.path: a separate critic works with one actor rank and without runner.deterministic=true. Set "
                "actor.fsdp.size=1 and runner.deterministic=false, or use the policy's value head."
            )
        if self.runner.resume_dir is not None and self.ckpt is not None:
            yield (
                f"ckpt={self.ckpt} and runner.resume_dir={self.runner.resume_dir}: a resumed run loads its own "
                "weights. Use one of the two keys."
            )


class SftConfig(RunConfig):
    """`embodyrl sft`."""

    dry_run = "embodyrl.extensions.demonstrations.sft_setup:sft_facts"

    checkpoint: CheckpointSettings = CheckpointSettings()

    def problems(self) -> Iterator[str]:
        """Yield contradictions about actor ranks."""
        yield from super().problems()
        yield from _ranks(self)


class ServeConfig(PolicyConfig):
    """`embodyrl serve`."""

    dry_run = "embodyrl.extensions.serving.serve:server_facts"

    ckpt: Path | None = None
    """Weights to serve: a run, a checkpoint folder, or assets/<name>; default: the model's own."""
    env: EnvSettings


class DaggerConfig(CollectConfig, SftConfig):
    """`embodyrl dagger`: the keys of `collect` and `sft`."""

    dry_run = "embodyrl.extensions.demonstrations.dagger:dagger_facts"

    dagger: DaggerSettings = DaggerSettings()


ROOTS: dict[str, type[Root]] = {
    "train": TrainConfig,
    "eval": EvalConfig,
    "collect": CollectConfig,
    "sft": SftConfig,
    "serve": ServeConfig,
    "dagger": DaggerConfig,
    "check-env": CheckConfig,
}
PLAYED = {"eval": ("eval",), "collect": ("train",), "dagger": ("train",), "check-env": ("train",)}
"""Splits of the environment that a command runs; other commands run both."""


_VIDEO = "video_cfg.base_dir video_cfg.fps video_cfg.info_on_video faults.on_video_error"
_SAMPLED = {
    "eval.sampling_params.do_sample": "algorithm.sampling_params.temperature algorithm.sampling_params.top_k "
    "algorithm.sampling_params.top_p"
}
_RECORDED = {
    "never: recordings are a data set": "video_cfg faults.on_video_error",
    "never: `collect` plays env.train and collect.episodes": "env.eval eval.episodes eval.episodes_per_task "
    "eval.samples eval.baseline eval.show_replies eval.sampling_params.temperature",
}
_LOOP = "runner.max_steps runner.max_epochs runner.val_check_interval runner.save_interval runner.resume_dir"
NEEDS: dict[str, dict[str, str]] = {
    "train": {
        "runner.only_eval": "eval.baseline",
        "runner.only_eval or runner.val_check_interval!=-1": "video runner.val_suites checkpoint.keep_best",
        "video!=none": _VIDEO,
        "algorithm.value_coef": "critic.path",
        "algorithm.value_coef or algorithm.tau": "actor.optim.value_lr actor.optim.value_clip_grad",
    },
    "eval": {
        "video!=none": _VIDEO,
        "never: nothing is trained": f"{_LOOP} actor.optim runner.only_eval rollout.mode rollout.num_workers",
        "never: `embodyrl eval` plays env.eval": "env.train",
    }
    | _SAMPLED,
    "collect": {"never: nothing is trained": f"{_LOOP} actor.optim"} | _SAMPLED | _RECORDED,
    "sft": {
        "never: no episodes are played": "runner.only_eval runner.val_suites runner.trace faults.step_timeout_s "
        "faults.on_env_crash faults.max_restarts_per_worker",
        "runner.val_check_interval!=-1": "data.val_path data.val_split checkpoint.keep_best",
    },
    "dagger": {
        "never: every round collects all episodes with labels of the expert": "collect.labels collect.filter",
        "never: the labels are imitated": "objective.name",
        "never: the same command resumes an incomplete run": "runner.on_existing runner.resume_dir",
    }
    | _SAMPLED
    | _RECORDED,
}
"""Conditions of each command for keys that have no effect without them, as in `Settings.needs`."""


def conditions(cfg: Root, command: str) -> dict[str, str]:
    """Return the conditions of keys that concern several sections, by condition."""
    found = {"reward.path=null or reward.mode=add": "env.use_rel_reward", **NEEDS.get(command, {})}
    for section in sections_of(cfg).values():
        found |= section.needs
    return found


def sections_of(cfg: Root) -> dict[str, Section]:
    """Return the sections of extensions that a config has, by name."""
    names = sorted({*SECTIONS.names()} & {*type(cfg).model_fields})
    return {name: section for name in names if isinstance(getattr(cfg, name), (section := SECTIONS.get(name)).kinds)}


def _algorithm(values: Mapping[str, Any]) -> type[Settings]:
    adv_type = name_of(values, "algorithm.adv_type", "grpo")
    return algorithm_settings(adv_type, name_of(values, "algorithm.loss_type", "ppo_clip"))


SELECTORS: dict[str, tuple[str, Callable[[Mapping[str, Any]], type[Settings]]]] = {
    "env": ("env_type", lambda values: ENVS.get(name_of(values, "env.env_type")).settings),
    "model": ("model_type", lambda values: POLICIES.get(name_of(values, "model.model_type")).settings),
    "launcher": ("name", lambda values: LAUNCHERS.get(name_of(values, "launcher.name", "local")).settings),
    "algorithm": ("adv_type", _algorithm),
}
"""Groups whose keys depend on a choice: the key that chooses, and the class of the keys that come with the choice."""


def name_of(values: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """Return the name of the part in a key.

    Raises:
        ConfigError: the value is not a name.
    """
    value = values.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{key}={spell(value):.200}: must be a name or package.module:attr.")
    return value


def selected(root: type[Root], group: str) -> Any:
    """Return the class of a group with a selectable part in this command; None: the command has no such group."""
    info, selector = root.model_fields.get(group), SELECTORS.get(group)
    kind = info.annotation if info else None
    return kind if selector and selector[0] in getattr(kind, "model_fields", {}) else None


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
        key = "model.cuda_graphs" if cfg.model.recorded else "model.compile"
        yield f"{key}=true works with one actor rank. Use actor.fsdp.size=1, or {key}=false."
