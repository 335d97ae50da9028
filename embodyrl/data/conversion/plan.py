"""Plan of a conversion: the columns to convert, their names in the result, and the metadata of the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from embodyrl.data.cards import get_gripper
from embodyrl.data.conversion.settings import CAMERA, ConversionSettings, Target
from embodyrl.data.conversion.source import Description, Kind
from embodyrl.data.layout import Card
from embodyrl.data.settings import FrameFormat
from embodyrl.errors import ConfigError
from embodyrl.policies.inputs import describe_gripper
from embodyrl.types import ActionSpec, CameraSpec, EnvSpec

ASSUMED_FPS = 20.0
"""Frame rate of sources that do not declare one, in Hz."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of a conversion: source columns, their names in the result, and the metadata of the result."""

    description: Description
    keys: Mapping[str, str]
    card: Card
    """Metadata card of the result, without tasks: the tasks are added at the end of the conversion."""
    assumes_fps: bool
    """True if the frame rate is a guess, because neither the settings nor the source contain it."""

    def get_columns(self, target: str) -> list[str]:
        """Return the source columns that are converted to the column `target`, in order."""
        return [column for column, name in self.keys.items() if name == target]

    def get_banner_lines(self, source: Path, out: Path) -> list[tuple[str, str]]:
        """Return the lines of the start banner as (name, text) pairs."""
        env, described = self.card.env, self.description
        (height, width), image_format = env.cameras.size, "mp4" if self.card.video else "png"
        cameras = ", ".join(f"{name} ({self.get_columns(CAMERA + name)[0]})" for name in env.cameras.names)
        rate = " (assumed; set data.fps)" if self.assumes_fps else ""
        columns_text = {target: " + ".join(self.get_columns(target)) or "none" for target in Target}
        return [
            ("source", f"{source}: {described.kind}, {described.episodes} episodes of {env.name}"),
            ("cameras", f"{cameras} {height}x{width} {image_format}" if env.cameras.names else "none"),
            ("state", f"{columns_text[Target.state]}: {env.state_dim} numbers"),
            ("action", f"{columns_text[Target.action]}: {env.action.dim} numbers at {self.card.fps:g} Hz{rate}"),
            ("outcomes", f"reward: {columns_text[Target.reward]} · success: {columns_text[Target.success]}"),
            ("as stored", f"{describe_gripper(env.action.gripper)} · image_rotation_deg {env.cameras.rotation_deg}"),
            *((("left out", described.left_out),) if described.left_out else ()),
            *(("warning", warning) for warning in described.warnings),
            ("output", str(out)),
        ]


def plan_conversion(description: Description, data: ConversionSettings, origin: str) -> Plan:
    """Return the plan of a conversion; settings override the conventions of the source's layout.

    Raises:
        ConfigError: a column does not exist or has the wrong type, or no column is the action or an observation.
    """
    keys = _assign_columns(description, data)
    dim, state_dim = (
        sum(description.columns[name].size for name, target in keys.items() if target == target_name)
        for target_name in (Target.action, Target.state)
    )
    open_and_closed = data.gripper or description.conventions.gripper
    env = EnvSpec(
        name=description.name,
        action=ActionSpec(dim=dim, gripper=get_gripper(open_and_closed, data.gripper_index, dim)),
        tasks=(),
        states_per_task=(),
        cameras=_get_cameras(description, data, keys),
        state_dim=state_dim,
    )
    present = {*keys.values()} & {Target.reward, Target.success}
    # The success flag can be derived from rewards of 0 and 1.
    is_missing = {Target.reward: Target.reward not in present, Target.success: not present}
    collected = {"converted": origin, "keys": dict(keys), "instruction": data.instruction, "split": data.split}
    card = Card(
        env=env,
        fps=data.fps or description.fps or ASSUMED_FPS,
        video=data.images is FrameFormat.mp4 and bool(env.cameras.names),
        without=tuple(str(target) for target, missing in is_missing.items() if missing),
        collected=collected | {"skip_nonfinite": data.skip_nonfinite},
    )
    return Plan(description=description, keys=keys, card=card, assumes_fps=not (data.fps or description.fps))


def _assign_columns(description: Description, data: ConversionSettings) -> dict[str, str]:
    """Return the target column name of each source column to convert."""
    default_keys = {
        name: target for name, target in description.conventions.keys.items() if name in description.columns
    }
    keys = data.keys or default_keys
    for name, target in keys.items():
        expected_kind = (
            Kind.image if target.startswith(CAMERA) else Kind.text if target == Target.task else Kind.numbers
        )
        source_column = description.columns.get(name)
        if source_column is None or source_column.kind is not expected_kind:
            problem = (
                f"{name} contains {source_column.kind}, expected {expected_kind}"
                if source_column
                else f"the source has no column {name}"
            )
            if reason := description.unsupported.get(name):
                problem = f"{name} cannot be converted: {reason}"
            raise ConfigError(f"data.keys={{{name}: {target}}}: {problem}. Columns: {_list_columns(description)}.")
    targets = Counter(keys.values())
    if repeated := [
        target_name for target_name, n in targets.items() if n > 1 and target_name not in (Target.action, Target.state)
    ]:
        raise ConfigError(
            f"data.keys assigns several columns to {repeated[0]}, but only actions and states can be concatenated. "
            "Assign one column."
        )
    if Target.action not in targets:
        raise ConfigError(
            f"No column of the source is assigned to the action. Set data.keys={{COLUMN: action, ...}}; columns: "
            f"{_list_columns(description)}."
        )
    if not data.keys and not any(target == Target.state or target.startswith(CAMERA) for target in targets):
        raise ConfigError(
            f"No column of the source is assigned to a camera or to the state. Set data.keys={{COLUMN: {CAMERA}NAME, "
            f"COLUMN: {Target.state}, COLUMN: action}}; columns: {_list_columns(description)}."
        )
    return dict(keys)


def _get_cameras(description: Description, data: ConversionSettings, keys: Mapping[str, str]) -> CameraSpec:
    names = {target.removeprefix(CAMERA): name for name, target in keys.items() if target.startswith(CAMERA)}
    sizes = {description.columns[name].shape[:2] for name in names.values()}
    if len(sizes) > 1:
        raise ConfigError(f"The cameras differ in size ({sorted(sizes)}). Select cameras of one size with data.keys.")
    height, width = sizes.pop() if sizes else (0, 0)
    rotation = data.image_rotation_deg
    if rotation is None:
        rotation = description.conventions.image_rotation_deg
    return CameraSpec(names=tuple(names), size=(height, width), rotation_deg=rotation)


def _list_columns(description: Description) -> str:
    return ", ".join(f"{name} {list(column.shape)}" for name, column in description.columns.items())
