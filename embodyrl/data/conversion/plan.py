"""Plan of a conversion: the columns to convert, their names in the result, and the metadata of the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from embodyrl.data.conversion.settings import CAMERA, ConversionSettings, Target
from embodyrl.data.conversion.source import Conventions, Description, Kind
from embodyrl.data.layout import Card
from embodyrl.data.settings import FrameFormat
from embodyrl.errors import ConfigError
from embodyrl.policies.inputs import gripper_text
from embodyrl.types import ActionSpec, CameraSpec, EnvSpec, GripperConvention

ASSUMED_FPS = 20.0
"""Frame rate of sources that do not declare one, in Hz."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of a conversion: source columns, their names in the result, and the metadata of the result."""

    keys: Mapping[str, str]
    card: Card
    """Metadata card of the result, without tasks: the tasks are added at the end of the conversion."""
    episodes: int
    kind: str
    assumes_fps: bool
    """True if the frame rate is a guess, because neither the settings nor the source contain it."""
    left_out: str
    warnings: tuple[str, ...]

    def columns_of(self, target: str) -> list[str]:
        """Return the source columns that are converted to the column `target`, in order."""
        return [column for column, name in self.keys.items() if name == target]

    def facts(self, source: Path, out: Path) -> list[tuple[str, str]]:
        """Return the lines of the start banner as (name, text) pairs."""
        env = self.card.env
        (height, width), images = env.cameras.size, "mp4" if self.card.video else "png"
        cameras = ", ".join(f"{name} ({self.columns_of(CAMERA + name)[0]})" for name in env.cameras.names)
        rate = " (assumed; set data.fps)" if self.assumes_fps else ""
        named = {target: " + ".join(self.columns_of(target)) or "none" for target in Target}
        return [
            ("source", f"{source}: {self.kind}, {self.episodes} episodes of {env.name}"),
            ("cameras", f"{cameras} {height}x{width} {images}" if env.cameras.names else "none"),
            ("state", f"{named[Target.state]}: {env.state_dim} numbers"),
            ("action", f"{named[Target.action]}: {env.action.dim} numbers at {self.card.fps:g} Hz{rate}"),
            ("outcomes", f"reward: {named[Target.reward]} · success: {named[Target.success]}"),
            ("as stored", f"{gripper_text(env.action.gripper)} · image_rotation_deg {env.cameras.rotation_deg}"),
            *((("left out", self.left_out),) if self.left_out else ()),
            *(("warning", warning) for warning in self.warnings),
            ("output", str(out)),
        ]


def plan_conversion(described: Description, data: ConversionSettings, origin: str) -> Plan:
    """Return the plan of a conversion; settings override the conventions of the source's layout.

    Raises:
        ConfigError: a column does not exist or has the wrong type, or no column is the action or an observation.
    """
    keys = _columns(described, data)
    dim, state_dim = (
        sum(described.columns[name].size for name, target in keys.items() if target == wanted)
        for wanted in (Target.action, Target.state)
    )
    env = EnvSpec(
        name=described.name,
        action=ActionSpec(dim=dim, gripper=_gripper(described.conventions, data, dim)),
        tasks=(),
        states_per_task=(),
        cameras=_cameras(described, data, keys),
        state_dim=state_dim,
    )
    known = {*keys.values()} & {Target.reward, Target.success}
    # The success flag can be derived from rewards of 0 and 1.
    without = {Target.reward: Target.reward not in known, Target.success: not known}
    collected = {"converted": origin, "keys": dict(keys), "instruction": data.instruction, "split": data.split}
    card = Card(
        env=env,
        fps=data.fps or described.fps or ASSUMED_FPS,
        video=data.images is FrameFormat.mp4 and bool(env.cameras.names),
        without=tuple(str(target) for target, missing in without.items() if missing),
        collected=collected | {"skip_nonfinite": data.skip_nonfinite},
    )
    return Plan(
        keys=keys,
        card=card,
        episodes=described.episodes,
        kind=described.kind,
        assumes_fps=not (data.fps or described.fps),
        left_out=described.left_out,
        warnings=described.warnings,
    )


def _columns(described: Description, data: ConversionSettings) -> dict[str, str]:
    """Return the target column name of each source column to convert."""
    usual = {name: target for name, target in described.conventions.keys.items() if name in described.columns}
    keys = data.keys or usual
    for name, target in keys.items():
        wanted = Kind.image if target.startswith(CAMERA) else Kind.text if target == Target.task else Kind.numbers
        found = described.columns.get(name)
        if found is None or found.kind is not wanted:
            what = f"{name} contains {found.kind}, expected {wanted}" if found else f"the source has no column {name}"
            if reason := described.unread.get(name):
                what = f"{name} cannot be converted: {reason}"
            raise ConfigError(f"data.keys={{{name}: {target}}}: {what}. Columns: {_listed(described)}.")
    targets = Counter(keys.values())
    if repeated := [t for t, n in targets.items() if n > 1 and t not in (Target.action, Target.state)]:
        raise ConfigError(
            f"data.keys assigns several columns to {repeated[0]}, but only actions and states can be concatenated. "
            "Assign one column."
        )
    if Target.action not in targets:
        raise ConfigError(
            f"No column of the source is assigned to the action. Set data.keys={{COLUMN: action, ...}}; columns: "
            f"{_listed(described)}."
        )
    if not data.keys and not any(target == Target.state or target.startswith(CAMERA) for target in targets):
        raise ConfigError(
            f"No column of the source is assigned to a camera or to the state. Set data.keys={{COLUMN: {CAMERA}NAME, "
            f"COLUMN: {Target.state}, COLUMN: action}}; columns: {_listed(described)}."
        )
    return dict(keys)


def _gripper(known: Conventions, data: ConversionSettings, dim: int) -> GripperConvention | None:
    ends = data.gripper or known.gripper
    if ends is None:
        return None
    if not -dim <= data.gripper_index < dim:
        raise ConfigError(
            f"data.gripper_index={data.gripper_index} is out of range, because the actions have {dim} numbers. "
            f"Set an index from {-dim} to {dim - 1}."
        )
    return GripperConvention(open=ends[0], closed=ends[1], index=data.gripper_index)


def _cameras(described: Description, data: ConversionSettings, keys: Mapping[str, str]) -> CameraSpec:
    names = {target.removeprefix(CAMERA): name for name, target in keys.items() if target.startswith(CAMERA)}
    sizes = {described.columns[name].shape[:2] for name in names.values()}
    if len(sizes) > 1:
        raise ConfigError(f"The cameras differ in size ({sorted(sizes)}). Select cameras of one size with data.keys.")
    height, width = sizes.pop() if sizes else (0, 0)
    rotation = data.image_rotation_deg
    if rotation is None:
        rotation = described.conventions.image_rotation_deg
    return CameraSpec(names=tuple(names), size=(height, width), rotation_deg=rotation)


def _listed(described: Description) -> str:
    return ", ".join(f"{name} {list(column.shape)}" for name, column in described.columns.items())
