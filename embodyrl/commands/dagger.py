"""DAgger (arXiv 1011.0686): in each round, the policy acts, an expert labels or corrects the episodes, and SFT runs."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.commands.collect import collect, collection_banner_lines
from embodyrl.commands.sft import sft
from embodyrl.commands.sft_setup import sft_banner_lines
from embodyrl.config.compose import flatten
from embodyrl.config.settings import is_key_or_subkey
from embodyrl.data.settings import EpisodeFilter, Labels
from embodyrl.data.writer import read_episodes
from embodyrl.errors import CheckpointError, ConfigError, Interrupted, WorkerError
from embodyrl.plan.config import apply_overrides
from embodyrl.plan.experts import Expert, find_expert
from embodyrl.plan.keys import DELETED_KEYS
from embodyrl.plan.saved import dump_config, read_saved
from embodyrl.plan.schema import Config
from embodyrl.plan.settings import OnExisting
from embodyrl.plan.weights import resolve_weights

_WEIGHT_KEYS = ("seed", "model", "objective", "data", "actor", "runner.max_steps", "runner.max_epochs")
"""Config sections and keys that determine the weights of a round, except the keys in `_MEMORY_KEYS`."""
_MEMORY_KEYS = (
    *("actor.micro_batch_size", "actor.max_tokens_per_mbs", "actor.gradient_checkpointing"),
    *("actor.fsdp.size", "actor.fsdp.cpu_offload", "actor.fsdp.gradient_sync"),
)
"""Config keys that affect only memory and speed; results change by rounding errors only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaggerResult:
    """Result of `dagger`: the SFT run of the last round, and the data of all rounds."""

    run: Path
    """Run folder of the last round's SFT run."""
    data: tuple[Path, ...]
    """Folder with the labeled episodes of each round."""


class ScriptedExpert:
    """DAgger expert that labels every visited state with the action of the environment's scripted expert."""

    scripted: ClassVar[bool] = True
    target_actors: ClassVar[tuple[str, ...]] = ()

    def __init__(self, cfg: Config) -> None:
        """Create the expert, which has no settings."""

    def collect(self, cfg: Config) -> None:
        """Collect episodes of the policy with actions of the scripted expert as labels."""
        collect(apply_overrides(cfg, {"collect.labels": Labels.expert, "collect.filter": EpisodeFilter.all}))

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Do nothing and return None; the training log shows the progress."""
        return None

    def close(self) -> None:
        """Do nothing; the expert holds no resources."""
        return None


def dagger(cfg: Config, *, overrides: Sequence[str] = ()) -> DaggerResult:
    """Run DAgger, starting with the data in `data.path` and the weights of `ckpt` or of the model settings.

    Round n collects `collect.episodes` new episodes into <collect.out>/round_n. SFT run <name>_round_n then continues
    from the last weights for `runner.max_steps` steps, on the data of all rounds so far. The same command
    resumes with the first incomplete round, if `runner.experiment_name` is set.

    Raises:
        EmbodyError: any failure with a known cause.
    """
    out = Path(str(cfg.collect.out))
    name = cfg.runner.experiment_name or out.resolve().name
    runs = [Path(cfg.runner.output_dir) / f"{name}_round_{index + 1}" for index in range(cfg.dagger.rounds)]
    data = [out / f"round_{index + 1}" for index in range(cfg.dagger.rounds)]
    with ExitStack() as stack:
        expert: Expert | None = None
        for index, run in enumerate(runs):
            previous = runs[index - 1] if index else None
            _check_unchanged(_training_config(cfg, previous, run, data[: index + 1]), run)
            if cfg.runner.max_steps in CheckpointStore(run / "checkpoints").folders():
                continue
            if expert is None:
                _check_training(cfg)
                expert = stack.enter_context(closing(find_expert(cfg.dagger.expert)(cfg)))
            try:
                _run_round(cfg, expert, previous, run, data[: index + 1], overrides)
            except (Interrupted, CheckpointError, WorkerError) as error:
                error.args = (f"{error}; to continue all rounds, run the same command again",)
                raise
    return DaggerResult(run=runs[-1], data=tuple(data))


def _check_training(cfg: Config) -> None:
    """Check the demonstrations, the model and the GPUs of SFT before episodes are collected.

    Raises:
        EmbodyError: see `sft_banner_lines`.
    """
    sft_banner_lines(_training_config(cfg, None, Path(cfg.runner.output_dir), ()))


def _check_unchanged(cfg: Config, run: Path) -> None:
    """Raise an error if an earlier attempt at a round has other values of the settings that affect the weights.

    Raises:
        ConfigError: values differ; the message lists the values of the earlier attempt.
    """
    if not (file := run / "config.yaml").is_file():
        return
    old = {key: value for key, value in read_saved(file).items() if key not in DELETED_KEYS}
    new = flatten(yaml.safe_load(dump_config(cfg)))
    names = [
        name
        for name in {**old, **new}
        if is_key_or_subkey(name, _WEIGHT_KEYS) and not is_key_or_subkey(name, _MEMORY_KEYS)
    ]
    if differences := [f"{name}={old.get(name)}" for name in names if old.get(name) != new.get(name)]:
        raise ConfigError(
            f"{run} was created with {', '.join(differences)} and cannot resume with other values. Use the same "
            "settings, or choose another runner.experiment_name and collect.out."
        )


def _run_round(
    cfg: Config, expert: Expert, previous: Path | None, run: Path, data: Sequence[Path], overrides: Sequence[str]
) -> None:
    """Collect the episodes of this round in the last folder of `data`, and train on all folders."""
    round_values = {"seed": cfg.seed + len(data), "runner.experiment_name": f"{run.name}_acting"}
    expert.collect(
        apply_overrides(cfg, _initial_weight_overrides(cfg, previous) | {"collect.out": str(data[-1]), **round_values})
    )
    resume = run if run.exists() else None
    sft(_training_config(cfg, previous, run, data), overrides=overrides, resume=resume, on_step=expert.on_step)


def _training_config(cfg: Config, previous: Path | None, run: Path, data: Sequence[Path]) -> Config:
    """Return the SFT config of a round; the initial weights are those of the previous round."""
    # A round without corrected episodes has no data.
    folders = [*cfg.demonstrations.more, *(str(folder) for folder in data if read_episodes(folder))]
    actors = cfg.demonstrations.actors or list(find_expert(cfg.dagger.expert).target_actors)
    round_values = {"data.more": folders, "data.actors": actors, "runner.experiment_name": run.name}
    return apply_overrides(cfg, _initial_weight_overrides(cfg, previous) | round_values)


def _initial_weight_overrides(cfg: Config, previous: Path | None) -> dict[str, Any]:
    """Return the config overrides that select the initial weights: the previous round's weights, or the config's."""
    ckpt = cfg.ckpt if previous is None else str(previous)
    values: dict[str, Any] = {"runner.on_existing": OnExisting.resume}
    if previous is not None and "unnorm_key" in type(cfg.model).model_fields:
        values["model.unnorm_key"] = None  # the previous round saved statistics of its data
    return values | ({} if ckpt is None else {"ckpt": ckpt, "model.path": str(resolve_weights(ckpt))})


def dagger_banner_lines(cfg: Config) -> list[tuple[str, str]]:
    """Return the banner lines (label, text) of a DAgger run."""
    _check_training(cfg)
    return [
        *collection_banner_lines(cfg),
        ("rounds", f"{cfg.dagger.rounds}, after the demonstrations in {cfg.data.path}"),
    ]
