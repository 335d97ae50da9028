"""Environment spec of a data set, from meta/embodyrl.json (the card) or, for third-party data, from its metadata."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from embodyrl.data.layout import (
    ACTION,
    CARD_PATH,
    INFO_PATH,
    REWARD,
    STATE,
    SUCCESS,
    UNDESCRIBED,
    Card,
    get_dimension_names,
    image_key,
)
from embodyrl.data.rows import INDEX_COLUMNS
from embodyrl.data.settings import DemonstrationSettings
from embodyrl.data.tables import find_file, read_info, read_tasks
from embodyrl.envs.history import with_history
from embodyrl.errors import ConfigError, EmbodyError, format_reason
from embodyrl.files import read_small
from embodyrl.types import ActionSpec, CameraSpec, EnvSpec, GripperConvention

_CHANNELS = (1, 3, 4)
_THIRD_PARTY_KEYS = ("action_key", "state_key", "cameras", "gripper", "image_rotation_deg")
"""Config keys that apply only to third-party data sets."""


PLAIN = DemonstrationSettings()
"""Default settings, for data sets that contain the description of their environment."""


def get_gripper(open_and_closed: Sequence[float] | None, index: int, width: int) -> GripperConvention | None:
    """Return the gripper convention of the settings, for actions of `width` numbers.

    Raises:
        ConfigError: the index is out of range.
    """
    if open_and_closed is None:
        return None
    if not -width <= index < width:
        raise ConfigError(
            f"data.gripper_index={index} is out of range, because the actions have {width} numbers. "
            f"Set an index from {-width} to {width - 1}."
        )
    return GripperConvention(open=open_and_closed[0], closed=open_and_closed[1], index=index)


def read_card(root: Path, data: DemonstrationSettings = PLAIN) -> Card:
    """Read the card of a data set, and add the observation history of the settings.

    Raises:
        EmbodyError, ConfigError: see `read_stored_card`.
    """
    card = read_stored_card(root, data)
    return replace(card, env=with_history(card.env, data.history))


def read_stored_card(root: Path, data: DemonstrationSettings = PLAIN) -> Card:
    """Read the card of a data set: its environment spec and the settings of its collection.

    Raises:
        EmbodyError: the folder contains no data set, the description is damaged, or a link in meta/ leads outside.
        ConfigError: the data set needs further keys, or the keys contradict the data set.
    """
    for path in (root / "meta").glob("*.*"):
        find_file(root, path.relative_to(root))
    path = root / CARD_PATH
    try:
        if not path.exists() and (root / INFO_PATH).is_file():
            path = root / INFO_PATH
            return _build_third_party_card(root, read_info(root), data)
        card = Card.from_json(read_small(path).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        folder_text = (
            f"not a data set in the LeRobot layout ({INFO_PATH} is missing)" if root.is_dir() else "not a folder"
        )
        raise ConfigError(
            f"{root} is {folder_text}. Set the folder of a data set, or collect one: embodyrl collect env=... "
            f"{shlex.quote(f'collect.out={root}')}."
        ) from None
    except (OSError, KeyError, ValueError, TypeError, AttributeError, pa.ArrowException) as error:
        raise EmbodyError(
            f"{path} cannot be read ({format_reason(error)}). Download or collect the data set again, or choose "
            "another folder."
        ) from error
    set_keys = [f"data.{key}" for key in _THIRD_PARTY_KEYS if getattr(data, key) != getattr(PLAIN, key)]
    # Copies and conversions of other programs' data may lack these conventions.
    unknown = {"data.gripper"} if card.env.action.gripper is None else set()
    unknown |= {"data.image_rotation_deg"} if card.collected.get(UNDESCRIBED) else set()
    if set_keys and unknown.issuperset(set_keys):
        gripper = get_gripper(data.gripper, data.gripper_index, card.env.action.dim)
        rotation_deg = data.image_rotation_deg or card.env.cameras.rotation_deg
        action = replace(card.env.action, gripper=gripper)
        cameras = replace(card.env.cameras, rotation_deg=rotation_deg)
        return replace(card, env=replace(card.env, action=action, cameras=cameras))
    if set_keys:
        raise ConfigError(
            f"{', '.join(set_keys)}: {root} was written by embodyrl and already contains these values. Remove these "
            "keys."
        )
    return card


def _build_third_party_card(root: Path, info: dict[str, Any], data: DemonstrationSettings) -> Card:
    """Build the card of a third-party data set from its metadata and the settings."""
    features: dict[str, dict[str, Any]] = info["features"]
    columns = _get_camera_columns(root, features, data)
    kinds = {key: (features[key]["dtype"], *_get_image_size(root, key, features[key])) for key in columns.values()}
    if len(set(kinds.values())) > 1:
        sizes_text = ", ".join(f"{key}: {kind} {h}x{w}" for key, (kind, h, w) in kinds.items())
        raise ConfigError(
            f"data.path={root}: the image columns differ in size or type ({sizes_text}). Select columns of one size "
            "and type with data.cameras={name: column, ...}."
        )
    kind, height, width = next(iter(kinds.values()), ("image", 0, 0))
    vectors = [
        name
        for name in features
        if name not in INDEX_COLUMNS and isinstance(shape := features[name].get("shape"), list) and len(shape) == 1
    ]
    states = vectors if data.state_key != STATE else [name for name in vectors if "state" in name]
    for key, column, candidates in (
        ("data.action_key", data.action_key, vectors),
        ("data.state_key", data.state_key, states),
    ):
        # A data set may have no state; a state with another name must not be ignored silently.
        if column not in features and candidates:
            raise ConfigError(
                f"data.path={root} has no column '{column}'. Set {key} to one of: {', '.join(candidates)}."
            )
    tasks, action_dim = read_tasks(root), _get_vector_size(root, data.action_key, features[data.action_key])
    env = EnvSpec(
        name=str(info.get("robot_type") or root.name),
        action=ActionSpec(dim=action_dim, gripper=get_gripper(data.gripper, data.gripper_index, action_dim)),
        tasks=tuple(tasks.values()),
        states_per_task=(1,) * len(tasks),
        cameras=CameraSpec(names=tuple(columns), size=(height, width), rotation_deg=data.image_rotation_deg),
        state_dim=_get_vector_size(root, data.state_key, features[data.state_key]) if data.state_key in features else 0,
    )
    fps = info.get("fps")
    if not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise EmbodyError(f"{root / INFO_PATH}: fps is {fps!r}, expected a positive number. Correct the file.")
    missing = tuple(name for name in (REWARD, SUCCESS) if not _is_number(features.get(name)))
    sizes = {STATE: (data.state_key, env.state_dim), ACTION: (data.action_key, env.action.dim)}
    names_by_column = {name: get_dimension_names(features.get(key) or {}) for name, (key, _) in sizes.items()}
    names = {name: row for name, row in names_by_column.items() if len(row) == sizes[name][1] > 0}
    return Card(env=env, fps=float(fps), video=kind == "video", without=missing, names=names)


def _get_camera_columns(
    root: Path, features: Mapping[str, Mapping[str, Any]], data: DemonstrationSettings
) -> dict[str, str]:
    """Return the name of the image column of each camera, by camera name."""
    image_columns = [key for key, feature in features.items() if feature["dtype"] in ("image", "video")]
    if data.cameras:
        if unknown := [column for column in data.cameras.values() if column not in image_columns]:
            raise ConfigError(
                f"data.cameras: {root} has no image column '{unknown[0]}'. Columns: "
                f"{', '.join(image_columns) or 'none'}."
            )
        return dict(data.cameras)
    prefix = image_key("")
    if unnamed := [key for key in image_columns if not key.startswith(prefix)]:
        example = ", ".join(f"{key.rpartition('.')[2]}: {key}" for key in image_columns)
        raise ConfigError(
            f"data.path={root}: the image columns {', '.join(unnamed)} are not named {image_key('<camera>')}. "
            f"Select the cameras: 'data.cameras={{{example}}}'."
        )
    return {key.removeprefix(prefix): key for key in image_columns}


def _get_image_size(root: Path, key: str, feature: Mapping[str, Any]) -> tuple[int, int]:
    """Return the height and width of a camera column, whose shape has the channels first or last."""
    info = feature.get("info") or {}
    if info.get("video.is_depth_map") or info.get("is_depth_map"):
        raise ConfigError(f"data.path={root}: column '{key}' is a depth map. Select color cameras with data.cameras.")
    shape, names = _get_shape(root, key, feature), [str(name) for name in feature.get("names") or ()]
    channel_axes = [axis for axis in (2, 0) if len(shape) == 3 and shape[axis] in _CHANNELS]
    if not channel_axes:
        raise ConfigError(
            f"data.path={root}: '{key}' has the shape {list(shape)}, expected height, width and 1, 3 or 4 channels. "
            "Select other cameras with data.cameras."
        )
    channels_first = len(channel_axes) == 2 and names[:1] and names[0].startswith("c")
    size = shape[1:] if channels_first or channel_axes[0] == 0 else shape[:2]
    height, width = size[::-1] if "height" in names and "width" in names[: names.index("height")] else size
    return int(height), int(width)


def _is_number(feature: Mapping[str, Any] | None) -> bool:
    return feature is not None and feature.get("shape", [1]) == [1] and feature["dtype"] != "string"


def _get_vector_size(root: Path, key: str, feature: Mapping[str, Any]) -> int:
    shape = _get_shape(root, key, feature)
    if len(shape) != 1:
        raise ConfigError(
            f"data.path={root}: '{key}' has the shape {list(shape)}, expected one vector per step. Correct {INFO_PATH}."
        )
    return int(shape[0])


def _get_shape(root: Path, key: str, feature: Mapping[str, Any]) -> list[int]:
    shape = feature.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise EmbodyError(
            f"{root / INFO_PATH}: the shape of '{key}' is {shape!r}, expected a list of integers. Correct the file."
        )
    return shape
