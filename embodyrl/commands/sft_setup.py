"""Training data and model of an SFT run, loaded from demonstrations or text, and their banner lines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from embodyrl.channels.layout import RecordLayout, build_record_layout
from embodyrl.commands.banner import precision_banner_lines
from embodyrl.commands.sft_data import (
    build_policy_spec,
    data_statistics,
    load_samples,
    require_history,
    require_match,
    resolve_extra_folders,
    with_statistics,
)
from embodyrl.config.paths import resolve_asset
from embodyrl.data.cards import read_card
from embodyrl.data.checks import check_layout
from embodyrl.data.layout import INFO_PATH, is_embodyrl_dataset
from embodyrl.data.reader import Demonstrations, find_gripper_warnings
from embodyrl.data.samples import Samples
from embodyrl.data.settings import DemonstrationSettings, Objective
from embodyrl.data.statistics import describe_constant_dimensions
from embodyrl.data.tables import read_episodes
from embodyrl.devices import Gpus
from embodyrl.errors import ConfigError
from embodyrl.files import available_bytes, read_json
from embodyrl.plan.build import count_ranks, mismatches, plan_devices
from embodyrl.plan.memory_limits import require_devices
from embodyrl.plan.schema import Config
from embodyrl.plan.text import open_checked_rows
from embodyrl.policies import POLICIES
from embodyrl.policies.inputs import describe_gripper, find_input_problems
from embodyrl.policies.settings import ModelSettings
from embodyrl.specs import image_names
from embodyrl.text.conversation import TextRow, join_pair
from embodyrl.text.dataset import TextRows
from embodyrl.text.messages import join_messages
from embodyrl.text.settings import RowSettings
from embodyrl.text.specs import ANY_TEXT
from embodyrl.types import ActionKind, ByteArray, CameraSpec, EnvSpec, PolicySpec, TextSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SftInputs:
    """Training data and model of an SFT run."""

    env: EnvSpec
    policy: PolicySpec
    model: ModelSettings
    train: Samples
    validation: Samples | None
    notes: tuple[tuple[str, str], ...] = ()
    """Banner lines (label, text) about the scaling of the data and warnings about the data."""

    @property
    def banner_lines(self) -> list[tuple[str, str]]:
        """Banner lines (label, text) about the number of samples, left-out episodes, scaling and warnings."""
        demos = self.train.demos
        text = f"{len(self.train)} for training, {len(self.validation or ())} held out"
        if len(demos.skipped):
            numbers = ", ".join(map(str, demos.skipped.tolist()[:20]))
            text += f" · {len(demos.skipped)} episodes left out (non-finite: {numbers})"
        if empty := sum(not str(instruction).strip() for instruction in demos.instruction):
            text += f" · {empty} steps have an empty instruction"
        return [("samples", text), *self.notes]

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
        return build_record_layout(env, policy)


def load_inputs(cfg: Config, folder: Path) -> SftInputs:
    """Load the training data; create a checkpoint folder `folder` that contains the statistics of the demonstrations.

    Raises:
        EmbodyError: data are missing, damaged or too large, or do not fit the model.
    """
    inputs = _load_text(cfg) if isinstance(cfg.data, RowSettings) else _load_demonstrations(cfg, folder)
    if cfg.objective.trains_reward_model and not inputs.policy.can_be_reward_model:
        raise ConfigError(
            f"objective.name={cfg.objective.name}: model '{inputs.policy.name}' cannot be trained as a reward model. "
            "Use model=causal_lm with all weights (model.is_lora=false) for text, or model=cnn or model=mlp for robots."
        )
    if inputs.policy.steering:
        key = inputs.policy.steering.key
        raise ConfigError(f"{key} freezes the model, and SFT does not train its actor; remove the key.")
    is_success = inputs.train.is_solved
    if cfg.objective.name is Objective.success and (is_success.all() or not is_success.any()):
        raise ConfigError(
            f"data.path={cfg.data.path}: {int(is_success.sum())} of {len(is_success)} frames show success, but a "
            "classifier needs frames with and without success. Collect with collect.filter=all and "
            "env.train.ignore_terminations=true, which continues episodes after success; data sets "
            "recorded by other programs do not contain success."
        )
    return inputs


def _load_demonstrations(cfg: Config, folder: Path) -> SftInputs:
    root, model = resolve_asset(str(cfg.demonstrations.path)), cfg.model
    env = read_card(root, cfg.demonstrations).env
    notes: list[tuple[str, str]] = []
    is_paired = cfg.objective.name is Objective.dpo
    spec = build_policy_spec(cfg, env, folder)
    require_match(model, env, spec)
    train, validation = load_samples(cfg, env, spec)
    if is_paired and not len(train):
        raise ConfigError(
            f"objective.name=dpo: data.path={cfg.demonstrations.path} has no pair of a better and a worse episode from "
            "the same initial state. Collect several episodes per state: `embodyrl collect ckpt=... "
            "env.train.state_ids=[0,49] collect.episodes=200 collect.filter=all`."
        )
    if model.weights is not None and not is_paired:
        demos, steps = train.demos, train.steps
        episodes = len(np.unique(np.searchsorted(demos.stop, steps, side="right")))
        actions, states = train.actions[:, train.history - 1], demos.state[steps]
        model = with_statistics(model, folder, env, data_statistics(actions, states, env, episodes))
        if scaling := describe_constant_dimensions(actions, states):
            notes.append(("scaling", scaling))
    notes += [("warning", warning) for warning in train.demos.warnings]
    # An environment of this package may have a gripper that a task does not need.
    if not is_embodyrl_dataset(root):
        notes += [("warning", warning) for warning in find_gripper_warnings(env.action.gripper, train.demos.action)]
    env = replace(env, longest_demonstration=train.demos.longest)
    return SftInputs(env=env, policy=spec, model=model, train=train, validation=validation, notes=tuple(notes))


def augments_images(cfg: Config) -> bool:
    """Return whether the training images are augmented."""
    return isinstance(cfg.data, DemonstrationSettings) and cfg.data.image_aug and not cfg.objective.needs_text_pairs


def sft_banner_lines(cfg: Config) -> list[tuple[str, str]]:
    """Return the banner lines (label, text) of an SFT run.

    Raises:
        EmbodyError: the data set is damaged or missing, or the host has too few GPUs.
    """
    assert cfg.data.path is not None
    require_devices(cfg, plan_devices(cfg, training=True), Gpus())
    ranks = count_ranks(cfg)
    rank_text = f" on {ranks} actor ranks" if ranks > 1 else ""
    unit = "pairs" if cfg.objective.needs_text_pairs else "samples"
    objective_text = f" · objective {cfg.objective.name}" if cfg.objective.name is not Objective.imitation else ""
    epochs, max_steps = cfg.runner.max_epochs, f"{cfg.runner.max_steps} steps"
    length = max_steps if epochs < 0 else f"{epochs} epochs, at most {max_steps},"
    training = ("training", f"{length} of {cfg.actor.global_batch_size} {unit}{rank_text}{objective_text}")
    model = ("model", f"{cfg.model.weights or cfg.model.model_type} · {cfg.model.precision_name}")
    if isinstance(cfg.data, RowSettings):
        rows, _, policy = _get_text_parts(cfg)
        return [
            ("data", f"{cfg.data.path}: {len(rows)} rows of text, {rows.held_out} held out"),
            model,
            *precision_banner_lines(cfg),
            *(("warning", warning) for warning in (*rows.warnings, *policy.warnings)),
            training,
        ]
    root = resolve_asset(cfg.data.path)
    require_history(cfg, root)
    card = read_card(root, cfg.demonstrations)
    extra_paths, val_path = resolve_extra_folders(cfg)
    folders = (root, *extra_paths, *(() if val_path is None else (val_path,)))
    if problems := [problem for folder in folders for problem in check_layout(folder, cfg.demonstrations)]:
        raise ConfigError(problems)
    with TemporaryDirectory() as scratch:
        spec = build_policy_spec(cfg, card.env, Path(scratch))
    require_match(cfg.model, card.env, spec)
    count, names = spec.inputs.num_images, card.env.cameras.names
    frames = f"{card.env.state_dim} numbers of state, no images"
    if names[:count]:
        size, augmentation = "x".join(map(str, card.env.cameras.size)), "on" if augments_images(cfg) else "off"
        frames = f"{', '.join(names[:count])} {size} · augmentation {augmentation}"
        frames += f" · unused: {', '.join(names[count:])}" if names[count:] else ""
    convention = f"{describe_gripper(card.env.action.gripper)} · image_rotation_deg {card.env.cameras.rotation_deg}"
    return [
        *zip(("data", *("" for _ in cfg.demonstrations.more)), map(_describe_data, (root, *extra_paths)), strict=True),
        ("frames", frames),
        ("conventions", convention),
        model,
        *precision_banner_lines(cfg),
        *(("warning", warning) for warning in _input_warnings(cfg.model, spec, card.env)),
        training,
    ]


def _input_warnings(model: ModelSettings, spec: PolicySpec, env: EnvSpec) -> list[str]:
    """Return warnings about differences between the inputs in the data and the inputs of the initial weights."""
    if model.weights is None:
        return []
    problems = find_input_problems(resolve_asset(model.weights), spec, env, getattr(model, "cameras", None))
    return [f"{difference} SFT adapts the weights to the inputs of data.path." for difference, _ in problems]


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
        ConfigError: see `_get_text_parts`.
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
        is_solved=demos.success,
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
