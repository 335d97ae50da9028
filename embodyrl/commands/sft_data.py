"""Load the samples of SFT from data sets, add pairs or labels, and split them into training and validation."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from embodyrl.config.paths import resolve_asset
from embodyrl.data.cards import stored_card
from embodyrl.data.checks import set_differences
from embodyrl.data.labels import read_positive
from embodyrl.data.layout import Actor
from embodyrl.data.reader import Demonstrations, join_demonstrations, load_demonstrations
from embodyrl.data.samples import Samples
from embodyrl.data.settings import DemonstrationSettings, Objective
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.plan.build import mismatches
from embodyrl.plan.schema import Config
from embodyrl.plan.seeds import derive
from embodyrl.policies.settings import ModelSettings
from embodyrl.policies.vla.conditioning import NEGATIVE, POSITIVE
from embodyrl.specs import convert_gripper
from embodyrl.types import BoolArray, EnvSpec, PolicySpec

_VALIDATION_EPISODES = "sft-validation"


def load_samples(cfg: Config, env: EnvSpec, policy: PolicySpec) -> tuple[Samples, Samples | None]:
    """Load demonstrations and split them by episode into training and validation.

    Raises:
        EmbodyError: a folder is damaged, empty, or too large for the memory.
        ConfigError: data.more or data.val_path belongs to another environment.
    """
    data = cfg.demonstrations
    assert data.path is not None
    ranked = cfg.objective.name is Objective.dpo
    # Checked before frames are decoded, which takes minutes.
    more, val_path = further_folders(cfg)
    first = load_demonstrations(resolve_asset(data.path), data)
    demos = join_demonstrations([first, *(load_demonstrations(path, data) for path in more)])
    kinds = demos.reset_id if ranked else np.arange(demos.num_episodes)  # pairs: hold out whole initial states
    # Hold out episodes of `data.path` only: DAgger adds folders, and no round may train on later validation data.
    known, count = np.unique(kinds[: first.num_episodes]), 0
    if data.val_path is None and data.val_share and len(known) > 1:
        count = max(1, round(data.val_share * len(known)))
    order = np.random.default_rng(derive(cfg.seed, _VALIDATION_EPISODES)).permutation(len(known))
    aside = np.isin(kinds, known[order[:count]])
    if cfg.objective.labels is not None:
        return _labelled(cfg, demos, aside, env, policy)
    training = _samples(cfg, demos, np.flatnonzero(~aside).tolist(), env, policy)
    if val_path is not None:
        demos = load_demonstrations(val_path, data)
    held_out = np.flatnonzero(aside).tolist() if val_path is None else list(range(demos.num_episodes))
    validation = _samples(cfg, demos, held_out, env, policy) if held_out else None
    return _checked(cfg, training), validation if validation is not None and len(validation) else None


def _checked(cfg: Config, training: Samples) -> Samples:
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


def require_instructions(policy: PolicySpec) -> None:
    """Check that a policy reads instructions, whose suffix is the advantage label.

    Raises:
        ConfigError: it does not.
    """
    if not policy.inputs.instructions:
        raise ConfigError(
            f"objective.labels: model '{policy.name}' has no instruction input, so the advantage cannot be added as a "
            "suffix. Use a model with instructions, for example model=flow_small, or use "
            "`embodyrl train algorithm=filtered_bc`."
        )


def require_match(model: ModelSettings, env: EnvSpec, policy: PolicySpec) -> None:
    """Check that a policy can be trained and fits the data.

    Raises:
        ConfigError: it cannot, or does not.
    """
    if model.weights is None and policy.untrainable:
        raise ConfigError(
            f"model_type '{model.model_type}' needs a trainable checkpoint folder (model.path) for SFT. Use, for "
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
    read, stored = spec.observed_steps, env.history
    if read != steps * stored and (read or steps > 1):
        reads = f"reads {read} observation step{'s' * (read > 1)} per sample" if read else "has no n_obs_steps"
        cure = f"Set data.history={read // stored or 1}."
        if read % stored:
            cure = f"The data contain {stored} steps per sample. Collect them with env.history=1."
        raise ConfigError(f"data.history={steps}: model '{spec.name}' {reads}. {cure}")


def _labelled(
    cfg: Config, demos: Demonstrations, aside: BoolArray, env: EnvSpec, policy: PolicySpec
) -> tuple[Samples, Samples | None]:
    """Return training and validation samples with the instruction suffixes of `objective.labels`."""
    require_instructions(policy)
    if cfg.data.val_path is not None or cfg.demonstrations.history > 1:
        raise ConfigError(
            "objective.labels cannot be combined with data.val_path or data.history. Remove objective.labels, or "
            "remove data.val_path and data.history."
        )
    suffixes = np.array([NEGATIVE, POSITIVE], object)[read_positive(Path(str(cfg.objective.labels)), demos)]
    chosen = [np.flatnonzero(kind).tolist() for kind in (~aside, aside) if kind.any()]
    plain = [_samples(cfg, demos, episodes, env, policy) for episodes in chosen]
    parts = [replace(part, tags=suffixes[part.steps].tolist()) for part in plain]
    return _checked(cfg, parts[0]), parts[1] if parts[1:] and len(parts[1]) else None


def further_folders(cfg: Config) -> tuple[list[Path], Path | None]:
    """Return the folders of `data.more` and `data.val_path` after a check that they match `data.path`.

    Raises:
        EmbodyError: a folder contains no data set, or its description is damaged.
        ConfigError: a data set belongs to another environment.
    """
    data = cfg.demonstrations
    # Equal reset ids of two environments are different initial states.
    alike = ("name", "states_per_task") if cfg.objective.name is Objective.dpo else ()
    more = [_same_kind(folder, data, *alike) for folder in data.more]
    return more, None if data.val_path is None else _same_kind(data.val_path, data)


def _same_kind(folder: str, data: DemonstrationSettings, *alike: str) -> Path:
    """Check that the demonstrations in `folder` can be combined with those in `data.path`; return the path of `folder`.

    Raises:
        ConfigError: the demonstrations differ from those of `data.path`.
    """
    assert data.path is not None
    root, other = resolve_asset(data.path), resolve_asset(folder)
    if differs := set_differences(
        (other, stored_card(other, data)), (root, stored_card(root, data)), *alike, data=data
    ):
        raise ConfigError(f"{folder} differs from data.path in {differs}. Use data of the same environment.")
    return other


def _samples(cfg: Config, demos: Demonstrations, episodes: list[int], env: EnvSpec, policy: PolicySpec) -> Samples:
    ranked, history, actors = cfg.objective.name is Objective.dpo, cfg.demonstrations.history, cfg.demonstrations.actors
    length = policy.imitated or policy.num_action_chunks
    steps = demos.ranked(episodes, length).ravel() if ranked else demos.steps_of(episodes)
    found, valid = demos.window(steps, length + history - 1, before=history - 1)
    if actors:
        chosen = (np.isin(demos.actor, [Actor[name] for name in actors])[found] | ~valid).all(axis=1)
        chosen = chosen.reshape(-1, 1 + ranked).all(axis=1).repeat(1 + ranked)  # whole pairs
        steps, found, valid = steps[chosen], found[chosen], valid[chosen]
    actions = demos.action[found]
    # Converted once for all samples: target actions use the policy's gripper convention, like the policy's outputs.
    convert_gripper(actions, env.action.gripper, policy.gripper)
    return Samples(
        demos=demos,
        steps=steps,
        actions=actions,
        shown=demos.shown,
        valid=valid,
        history=history,
        width=2 if ranked else 1,
    )
