"""Load the samples of SFT from data sets, add pairs, and split them into training and validation."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from embodyrl.config.paths import resolve_asset
from embodyrl.data.cards import stored_card
from embodyrl.data.checks import set_differences
from embodyrl.data.layout import Actor
from embodyrl.data.reader import Demonstrations, join_demonstrations, load_demonstrations
from embodyrl.data.samples import Samples
from embodyrl.data.settings import DemonstrationSettings, Objective
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.plan.build import mismatches
from embodyrl.plan.schema import Config
from embodyrl.plan.seeds import derive
from embodyrl.policies.settings import ModelSettings
from embodyrl.specs import convert_gripper
from embodyrl.types import EnvSpec, PolicySpec

_SPLIT_SEED = "sft-validation"


def load_samples(cfg: Config, env: EnvSpec, policy: PolicySpec) -> tuple[Samples, Samples | None]:
    """Load demonstrations and split them by episode into training and validation.

    Raises:
        EmbodyError: a folder is damaged, empty, or too large for the memory.
        ConfigError: data.more or data.val_path belongs to another environment.
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
    order = np.random.default_rng(derive(cfg.seed, _SPLIT_SEED)).permutation(len(unique_keys))
    is_held_out = np.isin(split_keys, unique_keys[order[:num_held_out]])
    training = _samples(cfg, demos, np.flatnonzero(~is_held_out).tolist(), env, policy)
    if val_path is not None:
        demos = load_demonstrations(val_path, data)
    held_out = np.flatnonzero(is_held_out).tolist() if val_path is None else list(range(demos.num_episodes))
    validation = _samples(cfg, demos, held_out, env, policy) if held_out else None
    return _require_samples(cfg, training), validation if validation is not None and len(validation) else None


def _require_samples(cfg: Config, training: Samples) -> Samples:
    """Check that there are training samples, and return them.

    Raises:
        ConfigError: no action chunk is only by the authors in `data.actors`.
    """
    if cfg.demonstrations.actors and not len(training):
        raise ConfigError(
            f"data.actors={list(cfg.demonstrations.actors)}: no action chunk of data.path comes only from these "
            "actors. Add actors, or remove data.actors."
        )
    return training


def require_match(model: ModelSettings, env: EnvSpec, policy: PolicySpec) -> None:
    """Check that a policy can be trained and fits the data.

    Raises:
        ConfigError: it cannot, or does not.
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


def require_history(cfg: Config, root: Path, describe: Callable[[EnvSpec], PolicySpec]) -> None:
    """Check that the policy reads the observation steps of the data; `describe` returns its spec.

    Raises:
        ConfigError: the policy reads another number of steps.
    """
    env, steps = stored_card(root, cfg.demonstrations).env, cfg.demonstrations.history
    try:
        # Without data.history, because the shapes of most policies do not fit a history.
        spec = describe(env)
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
    if differences := set_differences(
        (other, stored_card(other, data)), (root, stored_card(root, data)), *compared_fields, data=data
    ):
        raise ConfigError(f"{folder} differs from data.path in {differences}. Use data of the same environment.")
    return other


def _samples(cfg: Config, demos: Demonstrations, episodes: list[int], env: EnvSpec, policy: PolicySpec) -> Samples:
    is_paired, history, actors = (
        cfg.objective.name is Objective.dpo,
        cfg.demonstrations.history,
        cfg.demonstrations.actors,
    )
    length = policy.imitated or policy.num_action_chunks
    steps = demos.get_ranked_pairs(episodes, length).ravel() if is_paired else demos.get_steps(episodes)
    indices, valid = demos.window(steps, length + history - 1, before=history - 1)
    if actors:
        is_selected = (np.isin(demos.actor, [Actor[name] for name in actors])[indices] | ~valid).all(axis=1)
        is_selected = is_selected.reshape(-1, 1 + is_paired).all(axis=1).repeat(1 + is_paired)  # whole pairs
        steps, indices, valid = steps[is_selected], indices[is_selected], valid[is_selected]
    actions = demos.action[indices]
    # Converted once for all samples: target actions use the policy's gripper convention, like the policy's outputs.
    convert_gripper(actions, env.action.gripper, policy.gripper)
    return Samples(
        demos=demos,
        steps=steps,
        actions=actions,
        shown=demos.shown,
        valid=valid,
        history=history,
        width=2 if is_paired else 1,
    )
