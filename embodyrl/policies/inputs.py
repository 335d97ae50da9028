"""Inputs of a trained policy, saved with its weights: camera names, gripper convention, image orientation."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from embodyrl.errors import ConfigError, format_reason, reject_malformed
from embodyrl.files import read_json
from embodyrl.types import ActionKind, ByteArray, EnvSpec, GripperConvention, PolicySpec

INPUTS_FILE = "embodyrl_inputs.json"
_MAX_INSTRUCTIONS = 1000
"""Maximum number of instructions that are saved with the weights."""


def write_inputs(folder: Path, policy: PolicySpec, env: EnvSpec) -> None:
    """Write a description of the policy's inputs next to its weights, except for text policies."""
    if env.action.kind is not ActionKind.text:
        (folder / INPUTS_FILE).write_text(json.dumps(_describe_inputs(policy, env), indent=2) + "\n", encoding="utf-8")


def _describe_inputs(policy: PolicySpec, env: EnvSpec) -> dict[str, Any]:
    return {
        "environment": env.name,
        "cameras": list(env.cameras.names[: policy.inputs.num_images]),
        "image_size": list(env.cameras.size),
        "num_action_chunks": policy.num_action_chunks,
        "gripper": None if policy.gripper is None else asdict(policy.gripper),
        # A policy that rotates the frames always receives upright ones.
        "image_rotation_deg": 0 if policy.inputs.rotates_images else env.cameras.rotation_deg,
        "instructions": _get_instructions(env) if policy.inputs.instructions else [],
    } | ({"longest_demonstration": env.longest_demonstration} if env.longest_demonstration else {})


def read_saved_inputs(folder: Path) -> dict[str, Any]:
    """Return the chunk length, image size and cameras of the training run by config key, and the environment's name.

    The result is empty if the folder has no file written by `write_inputs`, or a file of an earlier version.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        saved = _read_inputs(folder)
        if "image_size" not in saved:
            return {}
        height, width = saved["image_size"]
        cameras = {"camera_heights": height, "camera_widths": width, "camera_names": saved["cameras"]}
        images = {f"env.init_params.{key}": value for key, value in cameras.items()} if saved["cameras"] else {}
        return images | {"model.num_action_chunks": saved["num_action_chunks"], "environment": saved["environment"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        file = folder / INPUTS_FILE
        raise ConfigError(f"{file} is damaged ({format_reason(error)}); use another checkpoint.") from None


def _read_inputs(folder: Path) -> dict[str, Any]:
    path = folder / INPUTS_FILE
    return read_json(path) if path.is_file() else {}


def _get_instructions(env: EnvSpec) -> list[str]:
    """Return an environment's instructions; the list is empty if they are unknown or too many to save."""
    instructions = (
        dict.fromkeys(env.instructions or env.tasks) if env.text.instructed and not env.text.prompt_bytes else {}
    )
    return [*instructions] if len(instructions) <= _MAX_INSTRUCTIONS else []


def find_unknown_instructions(folder: Path, env: EnvSpec, task_ids: Collection[int]) -> str | None:
    """Return a warning if the weights in a folder were not trained on any instruction of the given tasks."""
    known = _read_inputs(folder).get("instructions", [])
    selected_tasks = {*env.instructions} or {env.tasks[task] for task in task_ids}
    instructions = [text for text in _get_instructions(env) if text in selected_tasks]
    if not known or not instructions or {*known} & {*instructions}:
        return None
    return (
        f"the weights were not trained on any of the {len(instructions)} instructions of '{env.name}', for example "
        f"{instructions[0]!r:.80}; instructions in training: {len(known)}, for example {known[0]!r:.80}"
    )


def find_short_limits(folder: Path, limits: Mapping[str, int]) -> str | None:
    """Return a warning if the longest demonstration that the weights in `folder` were trained on exceeds a time limit.

    `limits` contains the maximum number of steps by config key.
    """
    longest = _read_inputs(folder).get("longest_demonstration", 0)
    too_short = [f"{key}={steps}" for key, steps in limits.items() if steps < longest]
    if not too_short:
        return None
    return (
        f"the longest demonstration of the weights has {longest} steps, more than {' and '.join(too_short)}, so slower "
        "episodes fail at the time limit; fix: set a larger limit"
    )


def rotate_upright(images: ByteArray, rotation_deg: int) -> ByteArray:
    """Rotate images [..., H, W, 3] by 0 or 180 degrees: from the simulator's orientation to upright, or back."""
    return images[..., ::-1, ::-1, :] if rotation_deg == 180 else images


def find_input_problems(
    folder: Path, policy: PolicySpec, env: EnvSpec, renamed: Sequence[str] | None
) -> Iterator[tuple[str, str]]:
    """Yield (difference, fix) for each difference between the policy's inputs in training and those of an environment.

    Args:
        folder: folder of the weights; nothing is checked if it does not describe its inputs.
        policy: spec of the policy.
        env: spec of the environment.
        renamed: names of the environment's cameras that replace the names in training (`model.cameras`).

    Raises:
        CheckpointError: the file is damaged.
    """
    cameras = list(env.cameras.names[: policy.inputs.num_images])
    if renamed is not None and list(renamed) != cameras:
        difference = f"model.cameras=[{','.join(renamed)}]: env '{env.name}' has [{','.join(cameras)}]."
        yield difference, "Select those cameras in that order (env.init_params.camera_names)."
    path = folder / INPUTS_FILE
    if not path.is_file():
        return
    with reject_malformed(path, "Use another checkpoint."):
        saved = read_json(path)
        trained_cameras, trained_env = list(saved["cameras"]), str(saved["environment"])
        trained_rotation = int(saved["image_rotation_deg"])
        gripper = None if saved["gripper"] is None else GripperConvention(**saved["gripper"])
    if renamed is None and trained_cameras != cameras:
        yield (
            f"The policy was trained on the cameras [{','.join(trained_cameras)}] of '{trained_env}', but "
            f"env '{env.name}' has [{','.join(cameras)}].",
            f"Set env.init_params.camera_names=[{','.join(trained_cameras)}], or, if only the names of the "
            f"views differ, model.cameras=[{','.join(cameras)}].",
        )
    rotation = _describe_inputs(policy, env)["image_rotation_deg"]
    if cameras and trained_rotation != rotation:
        yield (
            f"The policy was trained on frames of '{trained_env}' with image_rotation_deg={trained_rotation}, but "
            f"env '{env.name}' has frames with {rotation}.",
            "Use a model that rotates frames (openvla_oft, pi0, ...), or set the orientation of the data with "
            "data.image_rotation_deg.",
        )
    if _get_gripper_values(gripper, env) != _get_gripper_values(policy.gripper, env):
        yield (
            f"The policy was trained on '{trained_env}' with {describe_gripper(gripper)}, but env '{env.name}' "
            f"needs {describe_gripper(policy.gripper)}.",
            "Train it on data with this convention, and set data.gripper=[open,closed] and data.gripper_index.",
        )


def _get_gripper_values(gripper: GripperConvention | None, env: EnvSpec) -> tuple[float, float, int] | None:
    return None if gripper is None else (gripper.open, gripper.closed, gripper.index % env.action.dim)


def format_gripper(gripper: GripperConvention) -> str:
    """Return a gripper convention as short text."""
    return f"{gripper.open:g} = open, {gripper.closed:g} = closed"


def describe_gripper(gripper: GripperConvention | None) -> str:
    """Return a description of a gripper convention."""
    if gripper is None:
        return "no gripper convention"
    place = "" if gripper.index == -1 else f" (action {gripper.index})"
    return f"a gripper{place} that opens at {gripper.open:g} and closes at {gripper.closed:g}"
