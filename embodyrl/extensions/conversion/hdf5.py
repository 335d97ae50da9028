"""Source of demonstrations: HDF5 files in the layout of robomimic and LIBERO.

Layout: `data/demo_<i>/{actions, rewards, obs/...}`.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.errors import EmbodyError, MissingDependencyError, one_line
from embodyrl.extensions.conversion.source import (
    Column,
    Conventions,
    Description,
    Kind,
    RawEpisode,
    libero_keys,
    plain_shape,
)
from embodyrl.files import by_number

SUFFIXES = (".hdf5", ".h5")
_LIBERO = libero_keys(
    "obs/agentview_rgb", "obs/eye_in_hand_rgb", ["obs/ee_states", "obs/gripper_states"], "actions", reward="rewards"
)
_COMMON = {"actions": "action", "rewards": "next.reward"}


def find_hdf5(source: Path) -> list[Path]:
    """Return the HDF5 files of a source: the source itself, or all files in the folder and its subfolders."""
    if source.is_file():
        return [source] if source.suffix in SUFFIXES else []
    return sorted((path for path in source.rglob("*") if path.suffix in SUFFIXES), key=by_number)


class Hdf5Source:
    """Demonstrations in one or several HDF5 files."""

    def __init__(self, source: Path, files: Sequence[Path]) -> None:
        """Read the layout and the metadata of the files.

        Raises:
            MissingDependencyError: h5py is not installed.
            EmbodyError: a file is damaged or has another layout.
        """
        if importlib.util.find_spec("h5py") is None:
            raise MissingDependencyError(
                "HDF5 files need h5py, which is not installed: pip install 'embodyrl[convert]'."
            )
        self._episodes: list[tuple[Path, str]] = []
        self._instructions: dict[Path, str | None] = {}
        columns: dict[str, Column] = {}
        attributes: dict[str, Any] = {}
        for path in files:
            with _opened(path) as file:
                group = _group(file, "data")
                demos = sorted((name for name in group if name.startswith("demo")), key=by_number)
                attributes = attributes or dict(group.attrs)
                columns = columns or (dict(_columns(_group(group, demos[0]))) if demos else {})
                self._episodes += [(path, name) for name in demos]
                self._instructions[path] = _instruction(dict(group.attrs))
        is_libero = _LIBERO.keys() <= columns.keys()
        flipped = is_libero and attributes.get("macros_image_convention", "opengl") == "opengl"
        libero = Conventions(keys=_LIBERO, gripper=(-1, 1), image_rotation_deg=180 if flipped else 0)
        self._description = Description(
            kind=f"HDF5, {len(files)} files",
            name=source.stem.removesuffix("_demo"),
            episodes=len(self._episodes),
            columns=columns,
            fps=_control_frequency(attributes),
            conventions=libero if is_libero else Conventions(keys=_COMMON),
        )

    @property
    def description(self) -> Description:
        """Format, size, columns and conventions of the files."""
        return self._description

    def episodes(self, first: int, columns: Sequence[str]) -> Iterator[RawEpisode]:
        """Yield the episodes from number `first` on (see `Source.episodes`)."""
        for number in range(first, len(self._episodes)):
            path, name = self._episodes[number]
            where = f"{path}, data/{name}"
            with _opened(path, name) as file:
                demo, arrays = _group(_group(file, "data"), name), {}
                for column in columns:
                    if column not in demo:
                        raise EmbodyError(f"{where} has no dataset '{column}'. Download the file again.")
                    if not _is_array(_member(demo, column)):
                        raise EmbodyError(
                            f"{where}: '{column}' is not a numeric array with one row per step. Download the file "
                            "again."
                        )
                    arrays[column] = demo[column][()]
            yield RawEpisode(number=number, where=where, columns=arrays, instruction=self._instructions[path])


@contextmanager
def _opened(path: Path, name: str = "") -> Iterator[Any]:
    """Open a file for reading; error messages contain the file and the episode."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        place = f"{path}{f', data/{name}' if name else ''}"
        raise EmbodyError(
            f"{place} cannot be read: {one_line(error)}. Download the file again, or write it in the layout of "
            "robomimic: data/demo_<i>/actions and obs."
        ) from error


def _group(parent: Any, name: str) -> Any:
    """Return the group `name` of `parent`; raise ValueError if it is missing or not a group."""
    found = _member(parent, name)
    if not hasattr(found, "keys"):
        raise ValueError(f"'{found.name}' is an array instead of a group")
    return found


def _member(parent: Any, name: str) -> Any:
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


def _columns(demo: Any) -> Iterator[tuple[str, Column]]:
    """Yield the name and the description of each array of an episode that has one row per step."""
    actions, found = _member(demo, "actions"), {}
    if not _is_array(actions):
        raise ValueError(f"'{actions.name}' is not a numeric array with one row per step")
    demo.visititems(lambda name, item: found.update({name: item}) if _is_array(item) else None)
    for name, item in found.items():
        if item.shape[0] == actions.shape[0]:
            shape = plain_shape(item.shape[1:])
            image = item.dtype == np.uint8 and len(shape) == 3 and shape[2] in (1, 3)
            yield name, Column(Kind.image if image else Kind.numbers, shape)


def _instruction(attributes: dict[str, Any]) -> str | None:
    """Return the instruction in `problem_info`, where LIBERO stores it, or in `env_args`."""
    for name in ("problem_info", "env_args"):
        try:
            found = json.loads(str(attributes.get(name, "{}")))
        except ValueError:
            continue
        text = found.get("language_instruction") if isinstance(found, dict) else None
        if text:
            return str(" ".join(text) if isinstance(text, list) else text).strip().strip('"')
    return None


def _control_frequency(attributes: dict[str, Any]) -> float | None:
    try:
        arguments = json.loads(str(attributes.get("env_args", "{}")))
        found = arguments.get("env_kwargs", {}).get("control_freq")
        return float(found) if found and 0 < float(found) < math.inf else None
    except (ValueError, TypeError, AttributeError):
        return None
