"""Load the data of SFT (demonstrations or text), and store normalization statistics in a checkpoint folder."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from embodyrl.channels.layout import RecordLayout, record_layout
from embodyrl.commands.banner import precision_banner_lines
from embodyrl.commands.sft_data import (
    load_samples,
    require_history,
    require_match,
    resolve_extra_folders,
)
from embodyrl.config.paths import resolve_asset
from embodyrl.data.cards import read_card
from embodyrl.data.checks import check_layout
from embodyrl.data.layout import INFO_PATH, is_embodyrl_dataset
from embodyrl.data.reader import (
    Demonstrations,
    gripper_warnings,
)
from embodyrl.data.samples import Samples
from embodyrl.data.settings import DemonstrationSettings, Objective
from embodyrl.data.statistics import describe_constant_dimensions, scaling_stats
from embodyrl.data.tables import read_episodes
from embodyrl.errors import ConfigError
from embodyrl.files import available_bytes, read_json, write_atomically
from embodyrl.plan.build import count_ranks, mismatches
from embodyrl.plan.schema import Config
from embodyrl.plan.text import open_checked_rows
from embodyrl.policies import POLICIES
from embodyrl.policies.inputs import describe_gripper, input_problems
from embodyrl.policies.settings import ModelSettings
from embodyrl.policies.vla.folder import STATISTICS_FILE, check_statistics
from embodyrl.specs import image_names
from embodyrl.text.conversation import TextRow, join_pair
from embodyrl.text.dataset import TextRows
from embodyrl.text.messages import join_messages
from embodyrl.text.settings import RowSettings
from embodyrl.text.specs import ANY_TEXT
from embodyrl.types import ActionKind, ByteArray, CameraSpec, EnvSpec, FloatArray, PolicySpec, TextSpec

_MAX_COPIED_BYTES = 16 * 2**20
_CONSTANT_STD = 1e-5
"""Standard deviation of an action dimension, relative to half its range, that counts as constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftInputs:
    """Training data and model of an SFT run."""

    env: EnvSpec
    policy: PolicySpec
    model: ModelSettings
    train: Samples
    validation: Samples | None
    warnings: tuple[str, ...] = ()
    """Warnings about the data, one line each."""
    scaling: str = ""
    """Text for the start banner about dimensions that are constant or rarely differ; empty if there are none."""

    @property
    def exclusion_text(self) -> str:
        """Text for the start banner about skipped episodes and empty instructions."""
        demos = self.train.demos
        numbers = ", ".join(map(str, demos.skipped.tolist()[:20]))
        skipped = f" · {len(demos.skipped)} episodes left out (non-finite: {numbers})" if numbers else ""
        empty = sum(not str(text).strip() for text in demos.instruction)
        return skipped + (f" · {empty} steps have an empty instruction" if empty else "")

    @property
    def layout(self) -> RecordLayout:
        """Arena layout for the training and validation samples."""
        parts = [self.train, *([self.validation] if self.validation else [])]
        prompts = {str(text) for part in parts for text in part.demos.instruction}
        replies = {text for part in parts for text in part.replies}
        env = replace(self.env, text=TextSpec(prompt_bytes=max(len(text.encode()) for text in prompts)))
        policy = replace(
            self.policy,
            num_action_chunks=self.train.actions.shape[1],
            reply_bytes=max((len(text.encode()) for text in replies), default=0),
        )
        return record_layout(env, policy)


def load_inputs(cfg: Config, folder: Path) -> SftInputs:
    """Load the training data; create a checkpoint folder `folder` that contains the statistics of the demonstrations.

    Raises:
        EmbodyError: data are missing, damaged or too large, or do not fit the model.
    """
    inputs = _load_text(cfg) if isinstance(cfg.data, RowSettings) else _load_demonstrations(cfg, folder)
    if cfg.objective.trains_reward_model and not inputs.policy.rates:
        raise ConfigError(
            f"objective.name={cfg.objective.name}: model '{inputs.policy.name}' cannot be trained as a reward "
            f"model. Use "
            "model=causal_lm with all weights (model.is_lora=false) for text, or model=cnn or model=mlp for robots."
        )
    if inputs.policy.steering:
        key = inputs.policy.steering.key
        raise ConfigError(f"{key} leaves no trainable weights for SFT; remove the key.")
    is_success = inputs.train.shown
    if cfg.objective.name is Objective.success and (is_success.all() or not is_success.any()):
        raise ConfigError(
            f"data.path={cfg.data.path}: {int(is_success.sum())} of {len(is_success)} frames show success, but a "
            "classifier needs frames with and without success. Collect with collect.filter=all and "
            "env.train.ignore_terminations=true, which continues episodes after success; data sets "
            "recorded by other programs do not contain success."
        )
    return inputs


def _load_demonstrations(cfg: Config, folder: Path) -> SftInputs:
    env, model = read_card(resolve_asset(str(cfg.demonstrations.path)), cfg.demonstrations).env, cfg.model
    is_paired = cfg.objective.name is Objective.dpo
    uses_data_statistics = model.weights is not None and not is_paired
    spec, scaling = _spec(cfg, env, folder), ""
    require_match(model, env, spec)
    train, validation = load_samples(cfg, env, spec)
    if is_paired and not len(train):
        raise ConfigError(
            f"objective.name=dpo: data.path={cfg.demonstrations.path} has no pair of a better and a worse episode from "
            f"the same initial state. "
            "Collect several episodes per state: `embodyrl collect ckpt=... env.train.state_ids=[0,49] "
            "collect.episodes=200 collect.filter=all`."
        )
    if uses_data_statistics:
        demos, steps = train.demos, train.steps
        episodes = len(np.unique(np.searchsorted(demos.stop, steps, side="right")))
        actions, states = train.actions[:, train.history - 1], demos.state[steps]
        model = with_statistics(model, folder, env, data_statistics(actions, states, env, episodes))
        scaling = describe_constant_dimensions(actions, states)
    # An environment of this package may have a gripper that a task does not need.
    is_external = not is_embodyrl_dataset(resolve_asset(str(cfg.demonstrations.path)))
    warnings = (
        *train.demos.warnings,
        *(gripper_warnings(env.action.gripper, train.demos.action) if is_external else ()),
    )
    env = replace(env, longest_demonstration=train.demos.longest)
    return SftInputs(
        env=env, policy=spec, model=model, train=train, validation=validation, warnings=warnings, scaling=scaling
    )


def _spec(cfg: Config, env: EnvSpec, folder: Path) -> PolicySpec:
    """Return the policy spec for the data. Statistics of the initial weights, for other robots, are not read.

    Random initial weights need no statistics. DPO keeps the action statistics, which the reference also uses.

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

    Without a range of an action dimension, half the range is 1. A constant dimension has 0.
    """
    if env.action.kind is not ActionKind.box or not len(train):
        return ()
    low, high = np.array(env.action.bounds)
    half_range = np.where(np.isfinite(high - low) & (high > low), (high - low) / 2, 1.0)
    std = train.actions[:, train.history - 1].std(0, dtype=np.float64) / half_range
    return tuple(np.log(np.where(std > _CONSTANT_STD, std, 1.0)).tolist())


def data_statistics(actions: FloatArray, states: FloatArray, env: EnvSpec, episodes: int) -> dict[str, Any]:
    """Return the entry of `dataset_statistics.json` for a data set (see `scaling_stats`).

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
    # Constant actions keep their value, and constant states may change later.
    entry: dict[str, Any] = {"action": {**_describe(actions, unit=False), "mask": mask.tolist()}}
    if states.shape[-1]:
        entry["proprio"] = _describe(states, unit=True)
    for field in entry:
        statistics = {name: row for name, row in entry[field].items() if name != "mask"}
        check_statistics(statistics, f"the {field} of the data", varies=field == "action")
    return entry | {"num_transitions": len(actions), "num_trajectories": episodes}


def _describe(values: FloatArray, *, unit: bool) -> dict[str, list[float]]:
    stats = scaling_stats(values, unit=unit)[0]
    return {name: stats[name].tolist() for name in ("mean", "std", "max", "min", "q01", "q99")}


def statistics_key(env: EnvSpec) -> str:
    """Return the name under which the statistics of a data set are saved."""
    return env.benchmark.unnorm_key or env.name


def with_statistics(model: ModelSettings, target: Path, env: EnvSpec, entry: dict[str, Any]) -> ModelSettings:
    """Create a copy `target` of the model's checkpoint folder with the statistics of the data; return its config.

    Small files are copied, weights are linked: no large file is written before the first checkpoint.
    """
    source, key = resolve_asset(str(model.weights)), statistics_key(env)
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        copy = target / path.name
        copy.unlink(missing_ok=True)
        if path.is_file() and path.stat().st_size <= _MAX_COPIED_BYTES:
            shutil.copyfile(path, copy)
        else:
            # Weights are large and read-only; only the statistics change.
            copy.symlink_to(path.resolve())
    text = json.dumps({key: entry}, indent=2, allow_nan=False) + "\n"
    write_atomically(target / STATISTICS_FILE, text)
    return model.with_statistics(str(target), key)


def augments_images(cfg: Config) -> bool:
    """Return whether the training images are augmented."""
    return isinstance(cfg.data, DemonstrationSettings) and cfg.data.image_aug and not cfg.objective.needs_text_pairs


def sft_banner_lines(cfg: Config) -> list[tuple[str, str]]:
    """Return the lines of the start banner as (name, text) pairs.

    Raises:
        EmbodyError: the data set is damaged or missing.
    """
    assert cfg.data.path is not None
    ranks = count_ranks(cfg)
    rank_text = f" on {ranks} actor ranks" if ranks > 1 else ""
    unit = "pairs" if cfg.objective.needs_text_pairs else "samples"
    objective_text = f" · objective {cfg.objective.name}" if cfg.objective.name is not Objective.imitation else ""
    epochs, max_steps = cfg.runner.max_epochs, f"{cfg.runner.max_steps} steps"
    length = max_steps if epochs < 0 else f"{epochs} epochs, at most {max_steps},"
    training = ("training", f"{length} of {cfg.actor.global_batch_size} {unit}{rank_text}{objective_text}")
    if isinstance(cfg.data, RowSettings):
        rows, _, policy = _get_text_parts(cfg)
        return [
            ("data", f"{cfg.data.path}: {len(rows)} rows of text, {rows.held_out} held out"),
            ("model", f"{cfg.model.weights or cfg.model.model_type} · {cfg.model.precision_name}"),
            *precision_banner_lines(cfg),
            *(("warning", warning) for warning in (*rows.warnings, *policy.warnings)),
            training,
        ]
    root = resolve_asset(cfg.data.path)
    with TemporaryDirectory() as scratch:
        require_history(cfg, root, lambda env: _spec(cfg, env, Path(scratch)))
    card = read_card(root, cfg.demonstrations)
    extra_paths, val_path = resolve_extra_folders(cfg)
    folders = (root, *extra_paths, *(() if val_path is None else (val_path,)))
    if problems := [problem for folder in folders for problem in check_layout(folder, cfg.demonstrations)]:
        raise ConfigError(problems)
    with TemporaryDirectory() as scratch:
        spec = _spec(cfg, card.env, Path(scratch))
    require_match(cfg.model, card.env, spec)
    count = spec.inputs.num_images
    (height, width), names = card.env.cameras.size, card.env.cameras.names
    unused_text = f" · not read: {', '.join(names[count:])}" if names[count:] else ""
    augmentation = "on" if augments_images(cfg) else "off"
    cameras = f"{', '.join(names[:count])} {height}x{width} · augmentation {augmentation}{unused_text}"
    return [
        *zip(("data", *("" for _ in cfg.demonstrations.more)), map(_describe_data, (root, *extra_paths)), strict=True),
        ("frames", cameras if names[:count] else f"{card.env.state_dim} numbers of state, no images"),
        (
            "as stored",
            f"{describe_gripper(card.env.action.gripper)} · image_rotation_deg {card.env.cameras.rotation_deg}",
        ),
        ("model", f"{cfg.model.weights or cfg.model.model_type} · {cfg.model.precision_name}"),
        *precision_banner_lines(cfg),
        *(("warning", warning) for warning in _input_warnings(cfg.model, spec, card.env)),
        training,
    ]


def _input_warnings(model: ModelSettings, spec: PolicySpec, env: EnvSpec) -> list[str]:
    """Return warnings about differences between the inputs in the data and the inputs of the initial weights."""
    if model.weights is None:
        return []
    problems = input_problems(resolve_asset(model.weights), spec, env, getattr(model, "cameras", None))
    return [f"{problem.difference} SFT adapts the weights to the inputs of data.path." for problem in problems]


def _describe_data(root: Path) -> str:
    name, rows = read_json(root / INFO_PATH).get("robot_type") or root.name, read_episodes(root)
    return f"{root}: {len(rows)} episodes, {sum(row['length'] for row in rows)} frames of {name}"


def _get_text_parts(cfg: Config) -> tuple[TextRows, EnvSpec, PolicySpec]:
    """Return the text rows, and the specs of the environment and of the policy.

    Raises:
        ConfigError: a source or a row is malformed, or the model is not a language model.
    """
    factory, values = POLICIES.get(cfg.model.model_type), int(cfg.objective.trains_reward_model)
    if ActionKind.text not in factory.spec(cfg.model, ANY_TEXT, values).action_kinds:
        raise ConfigError(
            f"data.path={cfg.rows.path} contains text, but model '{cfg.model.model_type}' outputs actions. "
            "Use model=causal_lm, or a folder that `embodyrl collect` wrote."
        )
    rows = open_checked_rows(cfg, cfg.rows)
    env = replace(ANY_TEXT, text=TextSpec(roles=rows.roles))
    if rows.pictures:
        env = replace(env, cameras=CameraSpec(names=image_names(rows.pictures), size=rows.image_size, needed=True))
    policy = factory.spec(cfg.model, env, values)
    if problems := mismatches(env, policy) if rows.pictures else []:
        raise ConfigError(problems)
    return rows, env, policy


def _load_text(cfg: Config) -> SftInputs:
    """Load text rows; the target of a row is the reference answer with an end token.

    Raises:
        ConfigError: see `_text_parts`.
    """
    rows, env, policy = _get_text_parts(cfg)
    split = len(rows) - rows.held_out
    train, held_out = _build_text_samples(rows, range(split)), _build_text_samples(rows, range(split, len(rows)))
    return SftInputs(
        env=env, policy=policy, model=cfg.model, train=train, validation=held_out if len(held_out) else None
    )


def _build_text_samples(rows: TextRows, indices: range) -> Samples:
    """Convert each row to an episode of one step, whose observation is the conversation."""
    selected, steps = [rows[index] for index in indices], np.arange(len(indices))
    empty = np.zeros((len(indices), 0), np.float32)
    demos = Demonstrations(
        images=_stack_images(rows, selected),
        state=empty,
        action=empty,
        reward=np.zeros(len(indices), np.float32),
        success=np.zeros(len(indices), np.bool_),
        start=steps,
        stop=steps + 1,
        instruction=np.array([join_messages(row.messages) for row in selected], object),
    )
    replies = [row.reference if row.rejected is None else join_pair(row.reference, row.rejected) for row in selected]
    return Samples(
        demos=demos,
        steps=steps,
        actions=np.zeros((len(indices), 1, 1), np.float32),
        shown=demos.success,
        valid=np.ones((len(indices), 1), np.bool_),
        replies=replies,
    )


def _stack_images(rows: TextRows, selected: Sequence[TextRow]) -> ByteArray:
    """Return the images [M, C, H, W, 3] of the rows; smaller images are in the upper left corner.

    Raises:
        ConfigError: the images do not fit into the free memory.
    """
    shape = (len(selected), rows.pictures, *rows.image_size, 3)
    if math.prod(shape) > available_bytes() // 2:
        raise ConfigError(
            f"The decoded images need {math.prod(shape) >> 20} MiB, which is more than half of the free memory. "
            "Lower data.max_image_edge."
        )
    images = np.zeros(shape, np.uint8)
    for row_images, row in zip(images, selected, strict=True):
        for target, image in zip(row_images, row.pictures, strict=False):
            pixels = image.pixels()
            target[: pixels.shape[0], : pixels.shape[1]] = pixels
    return images
