"""Convert the episodes of a source to a LeRobot dataset v3.0 with a description of the environment.

The result is written to a temporary folder next to the final folder, which is renamed when complete; an interrupted
conversion resumes from the temporary folder.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import numpy as np

from embodyrl.data.conversion.hdf5 import Hdf5Source, find_hdf5
from embodyrl.data.conversion.plan import Plan
from embodyrl.data.conversion.rlds import RldsSource, find_rlds
from embodyrl.data.conversion.settings import CAMERA, ConversionSettings, Target
from embodyrl.data.conversion.source import RawEpisode, Source
from embodyrl.data.layout import CARD_PATH, INFO_PATH, STATES_PATH, Demonstration, write_file
from embodyrl.data.layout import Source as Origin
from embodyrl.data.reader import check_gripper
from embodyrl.data.writer import DatasetWriter
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.types import ByteArray, FloatArray

_PARTIAL = ".partial"

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertResult:
    """Result of a conversion: the folder, and the numbers of episodes, frames and tasks."""

    folder: Path
    episodes: int
    frames: int
    tasks: int
    left_out: int
    """Number of episodes that were skipped because of non-finite numbers."""


def open_source(path: Path, data: ConversionSettings) -> Source:
    """Open the data set at `path` in the format that its files indicate.

    Raises:
        ConfigError: the path contains no demonstrations in a known format, or a LeRobot data set.
        EmbodyError: the source is damaged.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist. Pass a file or folder with demonstrations.")
    if (path / INFO_PATH).is_file():
        raise ConfigError(
            f"{path} is a LeRobot data set, which needs no conversion. "
            f"Train on it: embodyrl sft {shlex.quote(f'data.path={path}')}."
        )
    if path.is_dir() and (folder := find_rlds(path)):
        return RldsSource(folder, data)
    if files := find_hdf5(path):
        return Hdf5Source(path, files, data)
    raise ConfigError(
        f"{path} contains no demonstrations of a known format: expected features.json (RLDS) or .hdf5 files (LIBERO, "
        f"robomimic)."
    )


def convert(source: Source, plan: Plan, data: ConversionSettings, out: Path, progress: Progress) -> ConvertResult:
    """Convert the episodes of a source to the data set `out`; resume an incomplete conversion.

    Raises:
        EmbodyError: an episode is damaged; earlier episodes are kept, and the same command resumes the conversion.
        ConfigError: the incomplete result was begun with other settings.
    """
    partial = out.with_name(out.name + _PARTIAL)
    writer = DatasetWriter(partial, plan.card)
    try:
        tasks = list(dict.fromkeys(row["tasks"][0] for row in writer.episodes))
        first = 1 + max((row["embodyrl/trial"] for row in writer.episodes), default=-1)
        progress(first, plan.description.episodes)
        for raw in source.episodes(first, list(plan.keys)):
            demonstration = _build_demonstration(raw, plan, data, tasks)
            if demonstration is not None:
                writer.append(demonstration)
            progress(raw.number + 1, plan.description.episodes)
        writer.flush()
    finally:
        writer.close()
        if not writer.episodes:  # the corrected command may have other settings
            shutil.rmtree(partial)
    if not writer.episodes:
        raise EmbodyError(
            f"No episode was converted to {out}: the source is empty, or every episode contains a non-finite number. "
            "Correct the source."
        )
    env = plan.card.env
    final_card = replace(plan.card, env=replace(env, tasks=tuple(tasks), states_per_task=(1,) * len(tasks)))
    write_file(partial / CARD_PATH, final_card.to_json().encode())
    if isinstance(source, Hdf5Source) and (states := source.initial_states()):
        np.savez(content := BytesIO(), allow_pickle=False, **states)
        write_file(partial / STATES_PATH, content.getvalue())
    os.replace(partial, out)
    num_converted = len(writer.episodes)
    return ConvertResult(
        folder=out,
        episodes=num_converted,
        frames=writer.num_frames,
        tasks=len(tasks),
        left_out=plan.description.episodes - num_converted,
    )


def _build_demonstration(
    raw: RawEpisode, plan: Plan, data: ConversionSettings, tasks: list[str]
) -> Demonstration | None:
    """Return an episode in the target format; None if the episode has non-finite numbers and is skipped.

    Raises:
        EmbodyError: the columns differ in length or shape, or a number is not finite.
    """
    steps = {name: len(values) for name, values in {**raw.columns, **raw.texts}.items()}
    if len(set(steps.values())) != 1 or not all(steps.values()):
        raise EmbodyError(
            f"{raw.where}: the columns have the lengths {steps}, expected equal lengths above 0. Download the file "
            "again."
        )
    (length,) = set(steps.values())
    if not raw.last_has_action:
        raw, length = _drop_last_step(raw, plan), length - 1
    env = plan.card.env
    action = _concatenate_columns(raw, plan, Target.action, length)
    state = _concatenate_columns(raw, plan, Target.state, length)
    reward = _concatenate_columns(raw, plan, Target.reward, length)
    reward = reward[:, 0] if reward.shape[1] else np.zeros(length, np.float32)
    for name, values in ((Target.action, action), (Target.state, state), (Target.reward, reward[:, None])):
        invalid = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(invalid) and data.skip_nonfinite:
            return None
        if len(invalid):
            raise EmbodyError(
                f"{raw.where}: {name} of step {invalid[0]} is {values[invalid[0]].tolist()}, expected finite "
                "numbers. Correct the data, or set data.skip_nonfinite=true to skip such episodes."
            )
    success, instruction = _get_success(raw, plan, reward), _get_instruction(raw, plan, data)
    check_gripper(raw.where, env.action.gripper, action)
    if instruction not in tasks:
        tasks.append(instruction)
    # `trial` is the index in the source, from which an interrupted conversion resumes.
    origin = Origin(task_id=tasks.index(instruction), reset_id=-1, trial=raw.number, seed=0)
    return Demonstration(
        images=_stack_images(raw, plan, length),
        state=state,
        action=action,
        reward=reward,
        success=success,
        instruction=instruction,
        source=origin,
    )


def _drop_last_step(raw: RawEpisode, plan: Plan) -> RawEpisode:
    """Remove the last step of an episode; a success flag or reward of 1 moves to the step before."""
    columns = {name: values[:-1] for name, values in raw.columns.items()}
    for name in (*plan.get_columns(Target.reward), *plan.get_columns(Target.success)):
        last, shortened = raw.columns[name][-1:], columns[name].copy()
        shortened[-1:] = np.where((shortened[-1:] == 0) & (last == 1), last, shortened[-1:])
        columns[name] = shortened
    if not all(map(len, columns.values())):
        raise EmbodyError(f"{raw.where} has no action, because its only step is marked as is_last. Correct the file.")
    return replace(raw, columns=columns, texts={name: texts[:-1] for name, texts in raw.texts.items()})


def _stack_images(raw: RawEpisode, plan: Plan, length: int) -> ByteArray:
    """Return the images of all cameras, [T, C, H, W, 3]."""
    cameras = plan.card.env.cameras
    images = np.zeros((length, len(cameras.names), *cameras.size, 3), np.uint8)
    for camera, name in enumerate(cameras.names):
        (column,) = plan.get_columns(CAMERA + name)
        stored = raw.columns[column]
        if stored.dtype != np.uint8 or stored.shape[1:3] != cameras.size:
            raise EmbodyError(
                f"{raw.where}: the images of {column} are {stored.dtype} {stored.shape[1:]}, expected uint8 "
                f"{(*cameras.size, 3)}. Correct the file."
            )
        images[:, camera] = stored
    return images


def _concatenate_columns(raw: RawEpisode, plan: Plan, target: Target, length: int) -> FloatArray:
    """Return the concatenated columns of a target, [T, n]."""
    with np.errstate(over="ignore"):  # reported as non-finite
        parts = [raw.columns[name].astype(np.float32).reshape(length, -1) for name in plan.get_columns(target)]
    joined = np.concatenate(parts, axis=1) if parts else np.zeros((length, 0), np.float32)
    expected = {Target.action: plan.card.env.action.dim, Target.state: plan.card.env.state_dim}.get(target)
    if expected is not None and joined.shape[1] != expected:
        raise EmbodyError(
            f"{raw.where}: {target} has {joined.shape[1]} numbers per step, expected {expected}. Correct the file."
        )
    return joined


def _get_success(raw: RawEpisode, plan: Plan, reward: FloatArray) -> np.ndarray | None:
    """Return the success flag of each step [T], or None if it is unknown.

    The flags come from the success column. Without such a column, they come from the reward if all rewards are 0 or 1.

    Raises:
        EmbodyError: the success column contains other values than 0 and 1.
    """
    for name in plan.get_columns(Target.success):
        stored = raw.columns[name].reshape(len(reward), -1)
        if stored.shape[1] != 1 or not np.isin(stored, (0, 1)).all():
            raise EmbodyError(
                f"{raw.where}: {name} has values other than 0 and 1. Correct the file, or do not assign this column "
                f"to {Target.success} in data.keys."
            )
        return stored[:, 0].astype(np.bool_)
    return reward == 1 if np.isin(reward, (0, 1)).all() else None


def _get_instruction(raw: RawEpisode, plan: Plan, data: ConversionSettings) -> str:
    texts = {text for name in plan.get_columns(Target.task) for text in raw.texts[name]}
    if len(texts) > 1 and data.instruction is None:
        raise EmbodyError(
            f"{raw.where} has {len(texts)} instructions, expected one per episode. Set data.instruction=TEXT, or "
            "select another column: data.keys={COLUMN: task, ...}."
        )
    instruction = data.instruction or next(iter(texts), raw.instruction)
    if not instruction:
        raise EmbodyError(
            f"{raw.where} has no instruction, expected one instruction per episode. Select a column with "
            "data.keys={COLUMN: task, ...}, or convert the episodes of each task separately with data.instruction=TEXT."
        )
    return instruction
