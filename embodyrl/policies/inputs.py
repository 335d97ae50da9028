"""What a trained policy was shown, stored with its weights: camera names, gripper convention, orientation. No torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from embodyrl.errors import CheckpointError
from embodyrl.types import ActionKind, EnvSpec, GripperConvention, PolicySpec

INPUTS_FILE = "embodyrl_inputs.json"


def write_inputs(folder: Path, policy: PolicySpec, env: EnvSpec) -> None:
    """Write what a policy is trained on next to its weights; policies of text have no such file."""
    if env.action_kind is not ActionKind.text:
        (folder / INPUTS_FILE).write_text(json.dumps(_inputs_of(policy, env), indent=2) + "\n", encoding="utf-8")


def _inputs_of(policy: PolicySpec, env: EnvSpec) -> dict[str, Any]:
    return {
        "environment": env.name,
        "cameras": list(env.cameras[: policy.num_images]),
        "gripper": None if policy.gripper is None else asdict(policy.gripper),
        # A policy that turns the frames is always shown upright ones.
        "image_rotation_deg": 0 if policy.turns_images else env.image_rotation_deg,
    }


def input_problems(folder: Path, policy: PolicySpec, env: EnvSpec, renamed: Sequence[str] | None) -> list[str]:
    """Compare what a policy was trained on with what an environment shows it, one line per difference.

    Args:
        folder: of its weights; without the file nothing is known.
        policy: as it would act.
        env: where it would act.
        renamed: names of the environment's cameras that take the place of those of the training (`model.cameras`).

    Raises:
        CheckpointError: the file is damaged.
    """
    cameras = list(env.cameras[: policy.num_images])
    problems = []
    if renamed is not None and list(renamed) != cameras:
        problems.append(
            f"model.cameras=[{','.join(renamed)}]: env '{env.name}' shows [{','.join(cameras)}]; select those cameras "
            "in that order (env.init_params.camera_names)."
        )
    path = folder / INPUTS_FILE
    if not path.is_file():
        return problems
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        seen, turned, where = list(saved["cameras"]), int(saved["image_rotation_deg"]), str(saved["environment"])
        gripper = None if saved["gripper"] is None else GripperConvention(**saved["gripper"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); use another checkpoint.") from error
    if renamed is None and seen != cameras:
        problems.append(
            f"The policy was trained on the cameras [{','.join(seen)}] of '{where}', env '{env.name}' shows "
            f"[{','.join(cameras)}]. Set env.init_params.camera_names=[{','.join(seen)}], or, where other names mean "
            f"the same views, model.cameras=[{','.join(cameras)}]."
        )
    now = _inputs_of(policy, env)["image_rotation_deg"]
    if cameras and turned != now:
        problems.append(
            f"The policy was trained on frames of '{where}' with image_rotation_deg={turned}, env '{env.name}' shows "
            f"frames with {now}. Use a model that turns frames (openvla_oft, pi0, ...), or state the orientation of "
            "the data with data.image_rotation_deg."
        )
    if _ends(gripper, env) != _ends(policy.gripper, env):
        problems.append(
            f"The policy was trained on '{where}' with {gripper_text(gripper)}, for env '{env.name}' it would need "
            f"{gripper_text(policy.gripper)}. Train it on data whose gripper is stated by data.gripper=[open,closed]."
        )
    return problems


def _ends(gripper: GripperConvention | None, env: EnvSpec) -> tuple[float, float, int] | None:
    return None if gripper is None else (gripper.open, gripper.closed, gripper.index % env.action_dim)


def gripper_text(gripper: GripperConvention | None) -> str:
    """Describe a convention."""
    if gripper is None:
        return "no gripper convention"
    return f"a gripper that opens at {gripper.open:g} and closes at {gripper.closed:g}"
