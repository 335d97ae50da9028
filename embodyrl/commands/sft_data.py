"""Demonstrations of SFT: load and split samples, check that the policy fits, and store normalization statistics."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from embodyrl.config.paths import resolve_asset
from embodyrl.data.cards import read_stored_card
from embodyrl.data.checks import describe_dataset_differences
from embodyrl.data.layout import Actor
from embodyrl.data.reader import Demonstrations, join_demonstrations, load_demonstrations
from embodyrl.data.samples import Samples
from embodyrl.data.settings import DemonstrationSettings, Objective
from embodyrl.data.statistics import compute_scaling_stats
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.files import write_atomically
from embodyrl.plan.build import mismatches
from embodyrl.plan.schema import Config
from embodyrl.plan.seeds import derive
from embodyrl.policies import POLICIES
from embodyrl.policies.settings import ModelSettings
from embodyrl.policies.vla.folder import STATISTICS_FILE, check_statistics, read_side_file
from embodyrl.specs import convert_gripper
from embodyrl.types import ActionKind, EnvSpec, FloatArray, PolicySpec

_MAX_COPIED_BYTES = 64 * 2**20
_CONSTANT_STD = 1e-5
"""Standard deviation, relative to half the range, up to which an action dimension is treated as constant."""


def load_samples(cfg: Config, env: EnvSpec, policy: PolicySpec) -> tuple[Samples, Samples | None]:
    """Load demonstrations and split them by episode into training and validation.

    Raises:
        EmbodyError: a folder is damaged, empty, or too large for the memory.
        ConfigError: data.more or data.val_path belongs to another environment, or no action chunk comes only from
            the actors in `data.actors`.
    """
    data = cfg.demonstrations
    assert data.path is not None
    is_paired = cfg.objective.name is Objective.dpo
    # Checked before frames are decoded, which takes minutes.
    extra_paths, val_path = resolve_extra_folders(cfg)
    first = load_demonstrations(resolve_asset(data.path), data)
    demos = join_demonstrations([first, *(load_demonstrations(path, data) for path in extra_paths)])
    split_keys = demos.reset_id if is_paired else np.arange(demos.num_episodes)  # pairs: hold out whole initial states
    # Hold out episodes of `data.path` only: DAgger adds folders, and no round may train on later validation data.
    unique_keys, num_held_out = np.unique(split_keys[: first.num_episodes]), 0
    if data.val_path is None and data.val_share and len(unique_keys) > 1:
        num_held_out = max(1, round(data.val_share * len(unique_keys)))
    order = np.random.default_rng(derive(cfg.seed, "sft-validation")).permutation(len(unique_keys))
    is_held_out = np.isin(split_keys, unique_keys[order[:num_held_out]])
    training = _make_samples(cfg, demos, np.flatnonzero(~is_held_out).tolist(), env, policy)
    if data.actors and not len(training):
        raise ConfigError(
            f"data.actors={list(data.actors)}: no action chunk of data.path comes only from these actors. Add actors, "
            "or remove data.actors."
        )
    held_out = np.flatnonzero(is_held_out).tolist()
    if val_path is not None:
        demos = load_demonstrations(val_path, data)
        held_out = list(range(demos.num_episodes))
    validation = _make_samples(cfg, demos, held_out, env, policy) if held_out else None
    return training, validation if validation is not None and len(validation) else None


def require_match(model: ModelSettings, env: EnvSpec, policy: PolicySpec) -> None:
    """Check that a policy can be trained and fits the data.

    Raises:
        ConfigError: the policy cannot be trained, or does not fit the data.
    """
    if model.weights is None and policy.untrainable:
        raise ConfigError(
            f"SFT cannot train model_type '{model.model_type}' without a checkpoint. Set model.path, or use, for "
            f"example, model=openvla_oft_tiny."
        )
    if problems := mismatches(env, policy):
        if policy.gripper is not None and env.action.gripper is None:
            problems.append("data.gripper=[open,closed] sets the gripper convention of the data.")
        raise ConfigError(problems)


def require_history(cfg: Config, root: Path) -> None:
    """Check that the policy reads the number of observation steps that the data contain.

    Raises:
        ConfigError: the policy reads another number of steps.
    """
    env, steps = read_stored_card(root, cfg.demonstrations).env, cfg.demonstrations.history
    try:
        # Without data.history, because the shapes of most policies do not fit a history.
        with TemporaryDirectory() as scratch:
            spec = build_policy_spec(cfg, env, Path(scratch))
    except EmbodyError:  # reported later, with the history
        return
    num_read, num_stored = spec.observed_steps, env.history
    if num_read != steps * num_stored and (num_read or steps > 1):
        input_text = (
            f"reads {num_read} observation step{'s' * (num_read > 1)} per sample" if num_read else "has no n_obs_steps"
        )
        fix = f"Set data.history={num_read // num_stored or 1}."
        if num_read % num_stored:
            fix = f"The data contain {num_stored} steps per sample. Collect them with env.history=1."
        raise ConfigError(f"data.history={steps}: model '{spec.name}' {input_text}. {fix}")


def resolve_extra_folders(cfg: Config) -> tuple[list[Path], Path | None]:
    """Return the folders of `data.more` and `data.val_path` after a check that they match `data.path`.

    Raises:
        EmbodyError: a folder contains no data set, or its description is damaged.
        ConfigError: a data set belongs to another environment.
    """
    data = cfg.demonstrations
    # Equal reset ids of two environments are different initial states.
    compared_fields = ("name", "states_per_task") if cfg.objective.name is Objective.dpo else ()
    extra_paths = [_resolve_matching_path(folder, data, *compared_fields) for folder in data.more]
    return extra_paths, None if data.val_path is None else _resolve_matching_path(data.val_path, data)


def _resolve_matching_path(folder: str, data: DemonstrationSettings, *compared_fields: str) -> Path:
    """Check that the demonstrations in `folder` can be combined with those in `data.path`; return the path of `folder`.

    Raises:
        ConfigError: the demonstrations differ from those of `data.path`.
    """
    assert data.path is not None
    root, other = resolve_asset(data.path), resolve_asset(folder)
    if differences := describe_dataset_differences(
        (other, read_stored_card(other, data)), (root, read_stored_card(root, data)), *compared_fields, data=data
    ):
        raise ConfigError(f"{folder} differs from data.path in {differences}. Use data of the same environment.")
    return other


def _make_samples(cfg: Config, demos: Demonstrations, episodes: list[int], env: EnvSpec, policy: PolicySpec) -> Samples:
    is_paired, data = cfg.objective.name is Objective.dpo, cfg.demonstrations
    length = policy.imitated or policy.num_action_chunks
    steps = demos.get_ranked_pairs(episodes, length).ravel() if is_paired else demos.get_steps(episodes)
    indices, valid = demos.window(steps, length + data.history - 1, before=data.history - 1)
    if data.actors:
        is_selected = (np.isin(demos.actor, [Actor[name] for name in data.actors])[indices] | ~valid).all(axis=1)
        is_selected = is_selected.reshape(-1, 1 + is_paired).all(axis=1).repeat(1 + is_paired)  # whole pairs
        steps, indices, valid = steps[is_selected], indices[is_selected], valid[is_selected]
    actions = demos.action[indices]
    # Converted once for all samples: target actions use the policy's gripper convention, like the policy's outputs.
    convert_gripper(actions, env.action.gripper, policy.gripper)
    return Samples(
        demos=demos,
        steps=steps,
        actions=actions,
        is_solved=demos.is_solved,
        valid=valid,
        history=data.history,
        steps_per_sample=2 if is_paired else 1,
    )


def build_policy_spec(cfg: Config, env: EnvSpec, folder: Path) -> PolicySpec:
    """Return the policy spec for the data, without the initial weights' statistics, which may be of another robot.

    Random initial weights need no statistics. With DPO, the statistics of the initial weights are kept, because the
    reference policy uses the same statistics.

    Args:
        cfg: config of the run.
        env: environment of the data.
        folder: new folder for a copy of the checkpoint with placeholder statistics.
    """
    model = cfg.model
    if model.weights is not None and cfg.objective.name is not Objective.dpo:
        action, state = (
            np.array([[-1], [1]], np.float32).repeat(dim, axis=1) for dim in (env.action.dim, env.state_dim)
        )
        model = with_statistics(model, folder, env, data_statistics(action, state, env, 0))
    return POLICIES.get(model.model_type).spec(model, env, int(cfg.objective.trains_reward_model))


def action_log_std(train: Samples, env: EnvSpec) -> tuple[float, ...]:
    """Return the log standard deviation of each action dimension, relative to half its range; empty if discrete.

    If a dimension has no finite range, half the range is taken as 1. A constant dimension has the value 0.
    """
    if env.action.kind is not ActionKind.box or not len(train):
        return ()
    low, high = np.array(env.action.bounds)
    half_range = np.where(np.isfinite(high - low) & (high > low), (high - low) / 2, 1.0)
    std = train.actions[:, train.history - 1].std(0, dtype=np.float64) / half_range
    return tuple(np.log(np.where(std > _CONSTANT_STD, std, 1.0)).tolist())


def data_statistics(actions: FloatArray, states: FloatArray, env: EnvSpec, episodes: int) -> dict[str, Any]:
    """Return the entry of `dataset_statistics.json` for a data set (see `compute_scaling_stats`).

    Args:
        actions: [N, A] in the policy's gripper convention.
        states: [N, S] proprioceptive states.
        env: spec with the gripper dimension, which is not normalized.
        episodes: number of demonstrations.
    """
    mask = np.ones(actions.shape[-1], np.bool_)
    if env.action.gripper is not None:
        # The gripper is not scaled, as in the public statistics, because its action is a binary choice.
        mask[env.action.gripper.index] = False
    # A constant action stays constant (`unit=False`), but a constant state may change in a rollout (`unit=True`).
    entry: dict[str, Any] = {"action": _describe(actions, unit=False)}
    if states.shape[-1]:
        entry["proprio"] = _describe(states, unit=True)
    for field, statistics in entry.items():
        check_statistics(statistics, f"the {field} of the data", varies=field == "action")
    entry["action"]["mask"] = mask.tolist()
    return entry | {"num_transitions": len(actions), "num_trajectories": episodes}


def _describe(values: FloatArray, *, unit: bool) -> dict[str, list[float]]:
    stats = compute_scaling_stats(values, unit=unit)[0]
    return {name: stats[name].tolist() for name in ("mean", "std", "max", "min", "q01", "q99")}


def with_statistics(model: ModelSettings, target: Path, env: EnvSpec, entry: dict[str, Any]) -> ModelSettings:
    """Create a copy `target` of the model's checkpoint folder with the statistics of the data; return its config.

    Small files are copied, weights are linked: no large file is written before the first checkpoint.
    """
    source, key = resolve_asset(str(model.weights)), env.benchmark.unnorm_key or env.name
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        copy = target / path.name
        copy.unlink(missing_ok=True)
        if path.is_file() and path.stat().st_size <= _MAX_COPIED_BYTES:
            copy.write_bytes(read_side_file(source, path.name))
        else:
            # Weights are large and read-only; only the statistics change.
            copy.symlink_to(path.resolve())
    text = json.dumps({key: entry}, indent=2, allow_nan=False) + "\n"
    write_atomically(target / STATISTICS_FILE, text)
    return model.with_statistics(str(target), key)
