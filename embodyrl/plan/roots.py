"""What each command reads: one root of settings a command, completed by the parts that were chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import PrivateAttr

from embodyrl.algorithms.protocol import ADVANTAGES, algorithm_settings
from embodyrl.algorithms.settings import ActingAlgorithm, AlgorithmSettings, ReplaySettings, ValueSettings
from embodyrl.cluster import LAUNCHERS
from embodyrl.cluster.protocol import ActingFaults, LauncherSettings, ProcessSettings, StepTimeout, parse_placement
from embodyrl.config.settings import Index, Path, Settings, spell
from embodyrl.datasets.settings import DataSettings, DemonstrationSettings, PairSettings, RowSettings
from embodyrl.datasets.text import holds_text
from embodyrl.envs import ENVS
from embodyrl.envs.settings import CheckedEnv, CollectEnv, EnvSettings, EvalEnv, TrainEnv, TrainSplit
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
    GreedySettings,
    LearnedRunSettings,
    MeasuredRunSettings,
    RecordedSettings,
    RolloutMode,
    RolloutSettings,
    RunnerSettings,
    ServeSettings,
    SupervisedFaults,
    SupervisedRunSettings,
    VideoChoice,
)
from embodyrl.policies import POLICIES
from embodyrl.policies.settings import ModelSettings
from embodyrl.rewards.settings import JudgeSettings
from embodyrl.workers.settings import (
    PAIRED,
    ActingSettings,
    ActorSettings,
    CriticSettings,
    FsdpSettings,
    LearnedActorSettings,
    Objective,
    ObjectiveSettings,
    SupervisedActorSettings,
)


def slot_problems(split: TrainSplit, size: int, launcher: LauncherSettings) -> Iterator[str]:
    """Say which slots groups of `size` cannot use, one line each with the fix."""
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
            f"algorithm.group_size={size} compares episodes of one initial state, but "
            "env.train.use_fixed_reset_state_ids=false gives each its own; set it to true."
        )
    workers = launcher.env_workers if isinstance(launcher, ProcessSettings) else "auto"
    if workers != "auto" and workers > slots:
        yield (
            f"launcher.env_workers={workers} but only env.train.total_num_envs={slots} slots: some workers would idle. "
            f"Use launcher.env_workers={slots}."
        )


def staleness_problems(lag: int, fsdp: FsdpSettings, mode: RolloutMode, *, deterministic: bool) -> Iterator[str]:
    """Say what an asynchronous run cannot be beside, one line each with the fix."""
    if lag and deterministic:
        yield (
            f"algorithm.max_staleness={lag}: which weights an asynchronous rollout acts with depends on the clock, so "
            "runner.deterministic=true cannot hold. Set one of them back."
        )
    if lag and (fsdp.size > 1 or fsdp.cpu_offload) and mode is RolloutMode.collocated:
        yield (
            f"algorithm.max_staleness={lag} acts while it trains, which takes one actor rank with its weights in "
            "place. Use rollout.mode=disaggregated, or actor.fsdp.size=1 and actor.fsdp.cpu_offload=false."
        )


R = TypeVar("R", bound="Root")


class Root(Settings):
    """What every command has."""

    seed: Index = 0
    """The one seed; every random stream is derived from it."""

    # Private, so that it is no key, is not written to files and does not make two equal configs different.
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
        # The section exists only with a launcher that brings it along.
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

    def idle(self) -> Iterator[tuple[str, str]]:
        """Name what a greedy choice does not read."""
        yield from super().idle()
        yield from _not_drawn(self.eval.sampling_params)


def _not_drawn(how: GreedySettings) -> Iterator[tuple[str, str]]:
    """What is about drawing, where nothing but the most probable is chosen."""
    if not how.do_sample:
        reason = "the policy chooses greedily; set eval.sampling_params.do_sample=true"
        yield from ((f"algorithm.sampling_params.{key}", reason) for key in ("temperature", "top_k", "top_p"))


class EvalConfig(ActingConfig):
    """`embodyrl eval`."""

    runner: MeasuredRunSettings = MeasuredRunSettings()
    env: EvalEnv
    algorithm: ActingAlgorithm = ActingAlgorithm()
    eval: EvalSettings = EvalSettings()
    video: VideoChoice = "none"
    """none, failures, first:N, all, or changed:N: after training, N episodes before and after it, by outcome."""
    video_cfg: VideoSettings = VideoSettings()

    def idle(self) -> Iterator[tuple[str, str]]:
        """Name what takes a training."""
        yield from super().idle()
        if self.video.startswith("changed:") and (not isinstance(self, TrainConfig) or self.runner.only_eval):
            yield "video", "changed:N compares two validations of a training; use first:N, failures or all"
        if not isinstance(self, TrainConfig):
            yield from _not_drawn(self.eval.sampling_params)
        for key in self.model.only_imitated:
            yield f"model.{key}", "nothing is imitated here; use `embodyrl sft`"


class TrainConfig(EvalConfig):
    """`embodyrl train`."""

    runner: RunnerSettings = RunnerSettings()
    env: TrainEnv
    algorithm: AlgorithmSettings = AlgorithmSettings()
    rollout: RolloutSettings = RolloutSettings()
    actor: ActorSettings = ActorSettings()
    critic: CriticSettings = CriticSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    faults: FaultSettings = FaultSettings()

    def problems(self) -> Iterator[str]:
        """Say what does not fit together, one line each with the fix."""
        yield from super().problems()
        yield from slot_problems(self.env.train, self.algorithm.group_size, self.launcher)
        lag, certain = self.algorithm.max_staleness, self.runner.deterministic
        yield from staleness_problems(lag, self.actor.fsdp, self.rollout.mode, deterministic=certain)
        yield from _ranks(self)
        if self.algorithm.curriculum and lag:
            yield "algorithm.curriculum: steps are planned before the last one is seen; set algorithm.max_staleness=0."
        if self.critic.path is not None and (certain or self.actor.fsdp.size > 1):
            yield (
                "critic.path: a critic apart works with one actor rank and without runner.deterministic=true. Set "
                "actor.fsdp.size=1 and runner.deterministic=false, or use the policy's value head."
            )
        if self.runner.resume_dir is not None and self.ckpt is not None:
            yield (
                f"ckpt={self.ckpt} and runner.resume_dir={self.runner.resume_dir}: a resumed run has weights of its "
                "own. Use one of them."
            )

    def idle(self) -> Iterator[tuple[str, str]]:
        """Name what another algorithm or model would read."""
        yield from super().idle()
        adv_type = self.algorithm.adv_type
        if not isinstance(self.algorithm, ValueSettings):
            reason = f"algorithm.adv_type={adv_type} asks for no values; use algorithm=ppo"
            replays = isinstance(self.algorithm, ReplaySettings)  # its critics have that rate
            rates = () if replays else ("actor.optim.value_lr", "actor.optim.value_clip_grad")
            yield from ((key, reason) for key in ("critic.path", *rates))
        known = not ADVANTAGES.problems([adv_type], "algorithm.adv_type")
        if known and not ADVANTAGES.get(adv_type).counts_chunk_steps:
            reason = f"algorithm.adv_type={adv_type} counts episodes; use algorithm=ppo"
            yield "env.train.max_steps_per_rollout_epoch", reason
        yield from _unspared(self.model)


def _unspared(model: ModelSettings) -> Iterator[tuple[str, str]]:
    if not model.recomputes:
        reason = f"model_type '{model.model_type}' keeps its few activations; choose a larger model"
        yield "actor.gradient_checkpointing", reason


class SftConfig(RunConfig):
    """`embodyrl sft`."""

    runner: SupervisedRunSettings = SupervisedRunSettings()
    launcher: LauncherSettings
    data: DataSettings = DataSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    actor: SupervisedActorSettings = SupervisedActorSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    faults: SupervisedFaults = SupervisedFaults()

    def problems(self) -> Iterator[str]:
        """Say which ranks there cannot be, and which data an objective wants."""
        yield from _ranks(self)
        either = self.objective.name in (Objective.imitation, Objective.dpo)
        wanted = PairSettings if self.objective.of_pairs else DemonstrationSettings
        if not either and not isinstance(self.data, wanted) and self.data.path:
            kind = "rows of text with two answers" if self.objective.of_pairs else "episodes that `collect` wrote"
            yield f"objective.name={self.objective.name} learns from {kind}; data.path={self.data.path} holds others."

    def idle(self) -> Iterator[tuple[str, str]]:
        """Name what is about simulators."""
        # A launcher has it all the same, because one class serves every command.
        yield "launcher.env_workers", "supervised training runs no simulators"
        if self.objective.of_pairs:
            yield "data.image_aug", f"objective.name={self.objective.name} shows both of a pair as they are"
        yield from _unspared(self.model)
        if not isinstance(self.data, RowSettings):
            yield "actor.max_tokens_per_mbs", "demonstrations have no lengths; use actor.micro_batch_size"


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
        yield from _not_drawn(self.eval.sampling_params)
        yield from _unspared(self.model)
        yield "actor.max_tokens_per_mbs", "demonstrations have no lengths; use actor.micro_batch_size"
        yield "collect.labels", "the expert labels in every round"
        yield "collect.filter", "failures are labelled too"
        yield "objective.name", "labels are imitated"
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


def _algorithm(values: Mapping[str, Any]) -> type[Settings]:
    adv_type = name_of(values, "algorithm.adv_type", "grpo")
    return algorithm_settings(adv_type, name_of(values, "algorithm.loss_type", "ppo_clip"))


def _data(values: Mapping[str, Any]) -> type[Settings]:
    if not holds_text(str(values.get("data.path", ""))):
        return DemonstrationSettings
    return PairSettings if values.get("objective.name") in PAIRED else RowSettings


SELECTORS: dict[str, tuple[str, Callable[[Mapping[str, Any]], type[Settings]]]] = {
    "env": ("env_type", lambda values: ENVS.get(name_of(values, "env.env_type")).settings),
    "model": ("model_type", lambda values: POLICIES.get(name_of(values, "model.model_type")).settings),
    "launcher": ("name", lambda values: LAUNCHERS.get(name_of(values, "launcher.name", "local")).settings),
    "algorithm": ("adv_type", _algorithm),
    "data": ("path", _data),
}
"""Groups whose keys depend on a choice: the key that chooses, and the class of the keys that come with the choice."""


def name_of(values: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """The name of a part that a key holds.

    Raises:
        ConfigError: it holds something else.
    """
    value = values.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{key}={spell(value)}: must be a name or package.module:attr.")
    return value


def selected(root: type[Root], group: str) -> Any:
    """The class below a group whose keys depend on a choice that the command reads; None: it does not."""
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
