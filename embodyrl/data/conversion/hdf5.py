"""Source of demonstrations: HDF5 files in the layout of robomimic and LIBERO.

Layout: `data/<episode>/{actions, rewards, obs/...}`. Attributes of an episode override those of `data` and of the file.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.data.conversion.plan import ASSUMED_FPS
from embodyrl.data.conversion.settings import ConversionSettings
from embodyrl.data.conversion.source import Column, Conventions, Description, Kind, RawEpisode
from embodyrl.data.tables import find_file
from embodyrl.errors import ConfigError, EmbodyError, MissingDependencyError, one_line
from embodyrl.files import natural_sort_key, visible_files
from embodyrl.types import DoubleArray

SUFFIXES = (".hdf5", ".h5")
_LIBERO = {
    "obs/agentview_rgb": "observation.images.agentview",
    "obs/eye_in_hand_rgb": "observation.images.robot0_eye_in_hand",
    "obs/ee_states": "observation.state",
    "obs/gripper_states": "observation.state",
    "actions": "action",
    "rewards": "next.reward",
}
"""Target of each column of LIBERO; cameras are named as in `env=libero`."""
_COMMON = {"actions": "action", "rewards": "next.reward"}
_TEXTS = ("problem_info", "env_args", "ep_meta")
"""Attributes with JSON objects that may contain the instruction: LIBERO, robomimic and RoboCasa."""
_INSTRUCTIONS = ("language_instruction", "lang", "env_lang", "instruction")
_SCENE = re.compile(r"[A-Z]\w*?_?SCENE\d+_")
"""Prefix of LIBERO's file names before the instruction."""
_FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_SUCCESS = ("success", "is_success", "succeeded", "successful", "task_success")
_HELD_OUT = ("valid", "val", "validation", "test")
"""Names of robomimic's masks (`mask/<name>`) with episodes that are not used in training."""


def find_hdf5(source: Path) -> list[Path]:
    """Return the HDF5 files of a source: the source itself, or all files in the folder and its subfolders."""
    if source.is_file():
        return [source] if source.suffix.lower() in SUFFIXES else []
    return [find_file(source, path.relative_to(source)) for path in visible_files(source, *SUFFIXES)]


class Hdf5Source:
    """Demonstrations in one or several HDF5 files."""

    def __init__(self, source: Path, files: Sequence[Path], data: ConversionSettings) -> None:
        """Read the layout and the metadata of the files.

        Raises:
            MissingDependencyError: h5py is not installed.
            EmbodyError: a file is damaged or has another layout.
            ConfigError: the split does not exist, or episodes have different conventions.
        """
        if importlib.util.find_spec("h5py") is None:
            raise MissingDependencyError(
                "HDF5 files need h5py, which is not installed: pip install 'embodyrl[convert]'."
            )
        self._episodes: list[tuple[Path, str, str | None]] = []
        self._declared: dict[str, tuple[str, str]] = {}
        left_out: Counter[str] = Counter()
        defaults, declares_rate = {"macros_image_convention": "opengl", "control_freq": data.fps or ASSUMED_FPS}, False
        columns: dict[str, Column] = {}
        for path in files:
            with _open_file(path) as file:
                group = _get_group(file, "data")
                names = sorted(group, key=natural_sort_key)
                demos = {name: _get_group(group, name) for name in names}
                columns = columns or (dict(_list_columns(demos[names[0]])) if names else {})
                excluded = _find_excluded(path, file, names, data.split)
                for name, demo in demos.items():
                    where = f"{path}, data/{name}"
                    if "actions" not in demo:
                        raise EmbodyError(f"{where} has no dataset 'actions'. Download the file again.")
                    attributes = [dict(holder.attrs) for holder in (demo, group, file)]
                    if name in excluded:
                        left_out[excluded[name]] += 1
                    elif not _is_success(where, attributes):
                        left_out["success=False"] += 1
                    else:
                        conventions = _read_conventions(attributes)
                        declares_rate |= "control_freq" in conventions
                        self._check_conventions(where, {**defaults, **conventions})
                        self._episodes.append((path, name, _find_instruction(attributes)))
        if left_out and not self._episodes:
            raise EmbodyError(
                f"{source}: no demonstration is left; skipped: {_format_counts(left_out)}. Convert other files."
            )
        is_libero = _LIBERO.keys() <= columns.keys()
        if is_libero:
            self._episodes = [(path, name, text or _parse_instruction(path)) for path, name, text in self._episodes]
        texts = {text for *_, text in self._episodes if text}
        if data.instruction and len(texts) > 1:
            raise ConfigError(
                f"data.instruction: {source} has {len(texts)} instructions ({', '.join(sorted(texts)):.200}). Remove "
                "data.instruction."
            )
        shared = {key: json.loads(value) for key, (value, _) in self._declared.items()}
        self.description = Description(
            kind=f"HDF5, {len(files)} files",
            name=source.resolve().stem.removesuffix("_demo"),
            episodes=len(self._episodes),
            columns=columns,
            fps=shared["control_freq"] if declares_rate else None,
            conventions=_get_libero_conventions(source, shared) if is_libero else Conventions(keys=_COMMON),
            left_out=_format_counts(left_out),
            warnings=(_ABSOLUTE,) if "control_delta" in shared else (),
        )

    def _check_conventions(self, where: str, conventions: Mapping[str, Any]) -> None:
        """Check that the conventions of an episode equal those of all earlier episodes that declare them.

        Raises:
            ConfigError: they differ.
        """
        for key, value in conventions.items():
            encoded = json.dumps(value, sort_keys=True)
            other, other_episode = self._declared.setdefault(key, (encoded, where))
            if other != encoded:
                raise ConfigError(
                    f"{where} has {key} {encoded:.200}, but {other_episode} has {other:.200}. Convert files with "
                    "different conventions to separate data sets."
                )

    def episodes(self, first: int, columns: Sequence[str]) -> Iterator[RawEpisode]:
        """Yield the episodes from number `first` on (see `Source.episodes`)."""
        for number in range(first, len(self._episodes)):
            path, name, instruction = self._episodes[number]
            where = f"{path}, data/{name}"
            with _open_file(path, name) as file:
                demo, arrays = _get_group(_get_group(file, "data"), name), {}
                for column in columns:
                    if column not in demo:
                        raise EmbodyError(f"{where} has no dataset '{column}'. Download the file again.")
                    if not _is_array(_get_member(demo, column)):
                        raise EmbodyError(
                            f"{where}: '{column}' is not a numeric array with one row per step. Download the file "
                            "again."
                        )
                    arrays[column] = demo[column][()]
            yield RawEpisode(number=number, where=where, columns=arrays, instruction=instruction)

    def initial_states(self) -> dict[str, DoubleArray]:
        """Return the simulator's state before the first action, by number of the episode, if the files contain it."""
        states: dict[str, DoubleArray] = {}
        for number, (path, name, _) in enumerate(self._episodes):
            with _open_file(path, name) as file:
                demo = _get_group(_get_group(file, "data"), name)
                if "states" in demo and _is_array(item := _get_member(demo, "states")) and len(item):
                    states[str(number)] = np.asarray(item[0], np.float64)
        return states


@contextmanager
def _open_file(path: Path, name: str = "") -> Iterator[Any]:
    """Open a file for reading; error messages contain the file and the episode."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        position = f"{path}{f', data/{name}' if name else ''}"
        raise EmbodyError(
            f"{position} cannot be read: {one_line(error)}. Download the file again, or write it in the layout of "
            "robomimic: data/demo_<i>/actions and obs."
        ) from error


def _get_group(parent: Any, name: str) -> Any:
    """Return the group `name` of `parent`; raise ValueError if it is missing or not a group."""
    group = _get_member(parent, name)
    if not hasattr(group, "keys"):
        raise ValueError(f"'{group.name}' is an array instead of a group")
    return group


def _get_member(parent: Any, name: str) -> Any:
    """Return the member `name` of `parent`; raise ValueError if the member is missing or stored in another file.

    Links and external data are rejected, because they can refer to any file of the computer.
    """
    import h5py

    item = parent
    for part in name.split("/"):
        if not isinstance(item.get(part, getlink=True), h5py.HardLink):
            raise ValueError(f"'{parent.name}/{name}' is missing, or is a link instead of stored data")
        item = item[part]
    if isinstance(item, h5py.Dataset) and (item.external or item.is_virtual):
        raise ValueError(f"the data of '{item.name}' are stored in another file")
    return item


def _is_array(item: Any) -> bool:
    """Return True for an HDF5 dataset of numbers with at least one dimension, the time step."""
    return bool(getattr(item, "shape", ())) and item.dtype.kind in "biuf"


def _list_columns(demo: Any) -> Iterator[tuple[str, Column]]:
    """Yield the name and the description of each array of an episode that has one row per step."""
    actions, arrays = _get_member(demo, "actions"), {}
    if not _is_array(actions):
        raise ValueError(f"'{actions.name}' is not a numeric array with one row per step")
    demo.visititems(lambda name, item: arrays.update({name: item}) if _is_array(item) else None)
    for name, item in arrays.items():
        if item.shape[0] == actions.shape[0]:
            shape = item.shape[1:]
            image = item.dtype == np.uint8 and len(shape) == 3 and shape[2] in (1, 3)
            yield name, Column(Kind.image if image else Kind.numbers, shape)


def _find_excluded(path: Path, file: Any, names: Sequence[str], split: str) -> dict[str, str]:
    """Return the reason for the exclusion of each episode outside the split, by name (see robomimic's `mask/<split>`).

    Without a mask `train`, the split contains all episodes that no mask holds out.

    Raises:
        ConfigError: the file has no such split.
        EmbodyError: a mask names an episode that the file does not contain.
    """
    group = _get_group(file, "mask") if "mask" in file else {}
    masks = {key: {_to_text(name) for name in _get_member(group, key)[()].ravel()} for key in group}
    if split not in masks and split != "train":
        raise ConfigError(f"data.split={split}: {path} has no mask '{split}'. Masks: {', '.join(masks) or 'none'}.")
    for key, episodes in masks.items():
        if unknown := sorted(episodes - set(names)):
            raise EmbodyError(f"{path}: mask/{key} names {unknown[0]}, which data does not contain. Correct the mask.")
    if split in masks:
        return dict.fromkeys((name for name in names if name not in masks[split]), f"not in mask/{split}")
    return {name: f"in mask/{key}" for key in _HELD_OUT for name in masks.get(key, ())}


def _format_counts(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count} demonstrations ({reason})" for reason, count in left_out.items())


def _to_text(value: Any) -> str:
    """Return an attribute as text; attributes of fixed length are bytes, and values may be arrays of one element."""
    value = np.asarray(value).ravel()[0] if np.size(value) == 1 else value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _parse_json(attributes: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the JSON object in an attribute; empty if there is none."""
    try:
        parsed = json.loads(_to_text(attributes.get(name, "{}")))
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _is_success(where: str, attributes: Sequence[Mapping[str, Any]]) -> bool:
    """Return False if an attribute such as `success` marks a failed attempt.

    Raises:
        EmbodyError: the attribute is neither true nor false.
    """
    flags = ((name, holder[name]) for holder in attributes for name in _SUCCESS if name in holder)
    name, value = next(flags, ("success", True))
    if (flag := _FLAGS.get(_to_text(value).lower())) is None:
        raise EmbodyError(f"{where}: the attribute {name} is {_to_text(value)!r}, expected true or false. Correct it.")
    return flag


def _find_instruction(attributes: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the instruction in the attributes of the episode, of `data` or of the file, in this order."""
    for holder in attributes:
        for candidates in (holder, *(_parse_json(holder, name) for name in _TEXTS)):
            text = next((candidates[name] for name in _INSTRUCTIONS if name in candidates), None)
            text = " ".join(map(_to_text, text)) if isinstance(text, list) else "" if text is None else _to_text(text)
            if text := text.strip().strip('"'):
                return text
    return None


def _parse_instruction(path: Path) -> str | None:
    """Return the instruction in the name of a file of LIBERO, `<scene>_<instruction>_demo.hdf5`."""
    if not path.stem.endswith("_demo"):
        return None
    return _SCENE.sub("", path.stem.removesuffix("_demo"), count=1).replace("_", " ").strip() or None


def _read_conventions(attributes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the declared image convention, control frequency and controller of an episode."""
    conventions: dict[str, Any] = {}
    for holder in reversed(attributes):
        if "macros_image_convention" in holder:
            conventions["macros_image_convention"] = _to_text(holder["macros_image_convention"])
        arguments = _parse_json(holder, "env_args").get("env_kwargs")
        arguments = arguments if isinstance(arguments, dict) else {}
        frequency = arguments.get("control_freq", holder.get("control_freq"))
        if _is_absolute(arguments) or _to_text(holder.get("control_delta", True)).lower() in ("false", "0"):
            conventions["control_delta"] = False
        if isinstance(frequency, int | float | np.number) and 0 < frequency < math.inf:
            conventions["control_freq"] = float(frequency)
        if "controller_configs" in arguments:
            conventions["controller_configs"] = arguments["controller_configs"]
    return conventions


_ABSOLUTE = "the actions are absolute (control_delta=false); most environments expect relative motions"


def _is_absolute(controller: Any) -> bool:
    """Return True if a controller of robosuite expects absolute poses."""
    if isinstance(controller, dict):
        absolute = controller.get("control_delta") is False or controller.get("input_type") == "absolute"
        return absolute or any(map(_is_absolute, controller.values()))
    return isinstance(controller, list) and any(map(_is_absolute, controller))


def _get_libero_conventions(source: Path, conventions: Mapping[str, Any]) -> Conventions:
    """Return the conventions of LIBERO's files.

    Raises:
        ConfigError: the files have actions or images that differ from those of LIBERO.
    """
    if "control_delta" in conventions:
        raise ConfigError(
            f"{source} has the columns of LIBERO, but its actions are absolute (control_delta=false), not "
            "relative as in env=libero. Record the demonstrations with control_delta=true."
        )
    rotations, convention = {"opengl": 180, "opencv": 0}, conventions.get("macros_image_convention")
    if convention not in rotations:
        raise ConfigError(
            f"{source}: macros_image_convention is {convention!r}, expected {' or '.join(rotations)}. Correct it."
        )
    return Conventions(keys=_LIBERO, gripper=(-1, 1), image_rotation_deg=rotations[convention])
