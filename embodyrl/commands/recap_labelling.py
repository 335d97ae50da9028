"""Value stage of a RECAP round, in a separate process: the driver loads neither frames nor torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from embodyrl.commands.sft_setup import data_statistics, with_statistics
from embodyrl.config.paths import resolve_asset
from embodyrl.data.cards import read_card
from embodyrl.data.checks import set_differences
from embodyrl.data.labels import Labels, get_frame_indices
from embodyrl.data.layout import write_file
from embodyrl.data.reader import Demonstrations, join_demonstrations, load_demonstrations
from embodyrl.data.recap.settings import LabelSource, RecapSettings
from embodyrl.data.recap.targets import (
    Outcomes,
    advantages,
    assign_folds,
    find_expert_frames,
    normalised_returns,
    rank_correlation,
    ranked_labels,
    shuffle_labels,
    thresholds,
)
from embodyrl.errors import ConfigError, WorkerError
from embodyrl.files import read_json
from embodyrl.isolation import NoResultError, call_isolated
from embodyrl.plan.seeds import derive_small
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.settings import ModelSettings
from embodyrl.policies.vla.conditioning import HasFeatures
from embodyrl.types import BoolArray, DoubleArray, EnvSpec, IntArray

if TYPE_CHECKING:
    from embodyrl.data.recap.value import ValueModel

_TIMEOUT_S = 24 * 3600.0
"""Time limit of the value stage, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Arguments of the value stage: data sets, model, settings and output files."""

    folders: tuple[str, ...]
    cfg: RecapSettings
    model: ModelSettings
    """Settings of the initial policy, whose features are the input of the value models."""
    seed: int
    labels: Path
    """Path of the output file with the labels of all frames, in the order of `folders`."""
    summary: Path
    """Path of the output file with the metrics as JSON, which is written last."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that determine the labels, by name, as JSON values."""
        values = self.cfg.model_dump(mode="json", exclude={"out", "rounds", "evaluate"})
        stage_settings = {f"recap.{name}": value for name, value in values.items()}
        return stage_settings | {"seed": self.seed, "model.path": str(resolve_asset(str(self.model.weights)).resolve())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """Metrics of the value models and labels of a round."""

    metrics: dict[str, Any]


def label_in_process(stage: Stage) -> dict[str, Any]:
    """Run the value stage in a child process, unless its output files exist; return its metrics.

    Raises:
        EmbodyError: the process failed.
        ConfigError: the files exist, but were written with other settings.
    """
    if not (stage.summary.is_file() and stage.labels.is_file()):
        try:
            metrics = call_isolated(f"{__name__}:label", stage, kind=Labelled, timeout_s=_TIMEOUT_S).metrics
        except NoResultError as error:
            raise WorkerError(
                f"The value stage for {stage.labels} failed: {error}. To resume, run the same command again."
            ) from error
        write_file(stage.summary, (json.dumps(metrics, indent=2) + "\n").encode())
    metrics, expected = read_json(stage.summary), stage.settings
    stored = metrics.get("settings", {})
    if differences := [f"{name}={stored.get(name)}" for name, value in expected.items() if stored.get(name) != value]:
        raise ConfigError(
            f"{stage.labels} was written with {', '.join(differences)}. Use these settings, or choose another "
            "recap.out."
        )
    return metrics


def label(stage: Stage) -> Labelled:
    """Train value models on all data, write the labels of all frames, and return metrics.

    Raises:
        ConfigError: a data set has other cameras, states or actions than `data.path`.
    """
    roots = [resolve_asset(folder) for folder in stage.folders]
    first, *other_sets = [(root, read_card(root)) for root in roots]
    for other in other_sets:
        if difference := set_differences(other, first):
            raise ConfigError(
                f"{other[0]} and {first[0]} differ in {difference}. Collect data.path again with the settings of this "
                "run."
            )
    demos = join_demonstrations([load_demonstrations(root) for root in roots])
    outcomes, cfg = Outcomes.of(demos), stage.cfg
    returns = normalised_returns(outcomes, cfg.failure_penalty)
    value = predict_held_out_values(demos, outcomes, returns, stage)
    advantage = advantages(outcomes, returns, value, cfg.advantage_steps)
    limits = thresholds(outcomes, advantage, cfg.positive_share)
    forced_labels = find_expert_frames(demos)
    ranked = ranked_labels(outcomes, advantage, limits)
    positive = ranked | forced_labels
    if cfg.labels is LabelSource.shuffled:
        positive = shuffle_labels(outcomes, positive, ~forced_labels, derive_small(stage.seed, "recap-shuffled"))
    episode, frame = get_frame_indices(demos)
    Labels(
        episode=episode,
        frame=frame,
        returns=returns.astype(np.float32),
        value=value.astype(np.float32),
        advantage=advantage.astype(np.float32),
        positive=positive,
    ).save(stage.labels)
    metrics = value_metrics(outcomes, returns, value) | label_fractions(outcomes, ranked, positive, forced_labels)
    names = {int(task): str(demos.instruction[start]) for task, start in zip(outcomes.task, demos.start, strict=True)}
    metrics |= {
        "settings": stage.settings,
        "held_out": cfg.value_folds > 1,
        "thresholds": {names[task]: limit for task, limit in limits.items()},
    }
    return Labelled(metrics=metrics)


def predict_held_out_values(
    demos: Demonstrations, outcomes: Outcomes, returns: DoubleArray, stage: Stage
) -> DoubleArray:
    """Return the value [N] of each frame, from a model not trained on the frame's episode (see `value_folds`).

    Frames after the first success, where the return is 0, have the value 0.
    """
    from embodyrl.data.recap.value import ValueTraining, rate, train_value

    cfg, build_model = stage.cfg, _value_models(demos, stage)
    count = min(cfg.value_folds, len(outcomes.start))
    fold = assign_folds(len(outcomes.start), count, derive_small(stage.seed, "recap-folds"))
    value = np.zeros(outcomes.frames)
    for index in range(count):
        held_out_frames = _frame_indices(outcomes, fold == index)
        training_frames = held_out_frames if count == 1 else _frame_indices(outcomes, fold != index)
        training = ValueTraining(
            steps=cfg.value_steps,
            batch_size=cfg.value_batch_size,
            lr=cfg.value_lr,
            seed=derive_small(stage.seed, "recap-value", index),
        )
        value[held_out_frames] = rate(train_value(build_model, training_frames, returns, training), held_out_frames)
    return value


def _value_models(demos: Demonstrations, stage: Stage) -> Callable[[], ValueModel]:
    """Return a function that builds a value model with random weights.

    Raises:
        ConfigError: the policy has no features.
    """
    import torch

    from embodyrl.data.recap.value import ValueModel, compute_features

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    env = read_card(resolve_asset(stage.folders[0])).env
    request = PolicyRequest(env=env, device=device, seed=stage.seed, trainable=False)
    with TemporaryDirectory() as folder:
        model = _with_statistics(stage, demos, env, Path(folder))
        policy = POLICIES.get(model.model_type).build(model, request)
    if not isinstance(policy, HasFeatures):
        raise ConfigError(
            f"recap: model '{policy.spec.name}' has no features, which are the inputs of the value models. Choose "
            "another model."
        )
    features = compute_features(policy, demos)
    return lambda: ValueModel(features).to(device)


def _with_statistics(stage: Stage, demos: Demonstrations, env: EnvSpec, folder: Path) -> ModelSettings:
    """Return the settings of the initial policy with the normalisation statistics of the data, as in SFT."""
    entry = data_statistics(demos.action, demos.state, env, demos.num_episodes)
    return with_statistics(stage.model, folder, env, entry)


def _frame_indices(outcomes: Outcomes, mask: BoolArray) -> IntArray:
    """Return the frame indices of the episodes in the mask `mask` [E], each up to its first success."""
    parts = [np.arange(outcomes.start[index], outcomes.end[index]) for index in np.flatnonzero(mask)]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def value_metrics(outcomes: Outcomes, returns: DoubleArray, value: DoubleArray) -> dict[str, float]:
    """Return the error and rank correlation of values with returns, and the mean values of successes and failures."""
    is_counted = outcomes.task_of_frame >= 0
    is_success = np.zeros(outcomes.frames, np.bool_)
    for start, end, success in zip(outcomes.start, outcomes.end, outcomes.success, strict=True):
        is_success[start:end] = success
    metrics = {
        "value_error": float(np.abs(returns - value)[is_counted].mean()),
        "value_rank_correlation": rank_correlation(returns[is_counted], value[is_counted]),
    }
    for name, mask in (("success", is_counted & is_success), ("failure", is_counted & ~is_success)):
        if mask.any():
            metrics[f"value_of_{name}"] = float(value[mask].mean())
    return metrics


def label_fractions(
    outcomes: Outcomes, ranked: BoolArray, positive: BoolArray, forced_labels: BoolArray
) -> dict[str, float]:
    """Return counts of episodes and frames, and the fractions of positive labels by rank and in total.

    The total includes the actions of an expert or a person, which are always positive (see `find_expert_frames`).
    """
    is_counted = outcomes.task_of_frame >= 0
    return {
        "episodes": float(len(outcomes.start)),
        "successes": float(outcomes.success.sum()),
        "frames": float(is_counted.sum()),
        "forced_frames": float((forced_labels & is_counted).sum()),
        "positive_by_rank": float(ranked[is_counted].mean()),
        "positive": float(positive[is_counted].mean()),
    }
