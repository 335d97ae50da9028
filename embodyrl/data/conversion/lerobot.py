"""Source of demonstrations: LeRobot datasets v2.0 and v2.1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from embodyrl.data.conversion.settings import CAMERA, ConversionSettings, Target
from embodyrl.data.conversion.source import Column, Conventions, Description, Kind, RawEpisode, plain_shape
from embodyrl.data.layout import CODEBASE_VERSION, INFO_PATH, number_names
from embodyrl.data.reader import EpisodeReader
from embodyrl.data.rows import find_rows, read_vectors
from embodyrl.data.settings import DemonstrationSettings
from embodyrl.data.tables import ONE_FILE_PER_EPISODE, read_episodes, read_info
from embodyrl.errors import ConfigError

_OUTCOMES = (str(Target.reward), str(Target.success))


class LerobotSource:
    """Episodes of a LeRobot v2 data set, which has one file per episode."""

    def __init__(self, root: Path, data: ConversionSettings) -> None:
        """Read the numeric columns of all episodes.

        Raises:
            EmbodyError: the data set is damaged.
            ConfigError: the data set already has the current layout, or a column does not exist.
        """
        info = read_info(root)
        if info["codebase_version"] not in ONE_FILE_PER_EPISODE:
            raise ConfigError(
                f"{root} already has LeRobot's layout {CODEBASE_VERSION}. Use it without conversion: "
                f"embodyrl sft data.path={root}."
            )
        features = info["features"]
        columns: dict[str, Column] = {
            name: Column(Kind.image, plain_shape(shape))
            if feature["dtype"] in ("image", "video")
            else Column(Kind.numbers, plain_shape(shape), tuple(number_names(feature)))
            for name, feature in features.items()
            if (shape := feature.get("shape")) and feature["dtype"] != "string"
        }
        usual = (str(Target.action), str(Target.state))
        same: dict[str, str] = {
            name: name
            for name, column in columns.items()
            if name in usual or name.startswith(CAMERA) or (name in _OUTCOMES and column.size == 1)
        }
        given: dict[str, str] = dict(data.keys or same)
        keys = {name: target for name, target in given.items() if target not in _OUTCOMES}
        self._reader = EpisodeReader(root, _settings(root, keys, columns, data.skip_nonfinite))
        self._outcomes = _read_outcomes(root, [name for name in given if name not in keys], columns)
        cameras = [name for name in keys if columns[name].kind is Kind.image]
        for name in cameras if self._reader.card.video else ():
            self._reader.videos.check(name)
        size = self._reader.card.env.cameras.size
        shown = {name: Column(Kind.image, (*size, 3)) for name in cameras}
        self._keys = keys
        self._description = Description(
            kind=f"LeRobot {info['codebase_version']}",
            name=self._reader.card.env.name,
            episodes=info.get("total_episodes", len(self._reader.episodes)),
            columns=columns | shown,
            fps=self._reader.card.fps,
            conventions=Conventions(keys=same),
            doubts=self._reader.doubts,
        )

    @property
    def description(self) -> Description:
        """Version, size, columns and conventions of the data set."""
        return self._description

    def episodes(self, first: int, columns: Sequence[str]) -> Iterator[RawEpisode]:
        """Yield the episodes, beginning with number `first` (see `Source.episodes`)."""
        cameras = [name for name, target in self._keys.items() if target.startswith(CAMERA)]
        vectors: dict[str, str] = {target: name for name, target in self._keys.items() if not target.startswith(CAMERA)}
        for row in self._reader.episodes:
            number = int(row["episode_index"])
            if number < first:
                continue
            where, found = f"{row['data/path']} (episode {number})", self._reader.read((number,))
            instructions = list(dict.fromkeys(found.instruction.tolist()))
            if len(instructions) > 1:
                raise ConfigError(
                    f"{where} has {len(instructions)} instructions ({', '.join(instructions)}), but a converted "
                    f"episode has only one. Train on the source without conversion: data.path=SOURCE."
                )
            arrays: dict[str, np.ndarray] = {name: found.images[:, place] for place, name in enumerate(cameras)}
            arrays |= {
                vectors[t]: v for t, v in ((Target.action, found.action), (Target.state, found.state)) if t in vectors
            }
            steps = slice(row["dataset_from_index"], row["dataset_to_index"])
            arrays |= {name: values[steps] for name, values in self._outcomes.items()}
            yield RawEpisode(number=number, where=where, columns=arrays, instruction=instructions[0])


def _read_outcomes(root: Path, names: Sequence[str], columns: Mapping[str, Column]) -> dict[str, np.ndarray]:
    """Return the reward and success columns `names` of all steps, each [N, 1], by column name.

    Raises:
        ConfigError: a column does not exist.
        EmbodyError: a column has several numbers per step.
    """
    if unknown := [name for name in names if name not in columns]:
        raise ConfigError(f"data.keys: {root / INFO_PATH} has no column {unknown[0]}. Columns: {', '.join(columns)}.")
    rows = find_rows(root, read_episodes(root)) if names else None
    return {} if rows is None else {name: read_vectors(rows, name, 1) for name in names}


def _settings(
    root: Path, keys: Mapping[str, str], columns: Mapping[str, Column], skip_nonfinite: bool
) -> DemonstrationSettings:
    """Return the settings of a reader for the columns in `keys` (source column: target column).

    Raises:
        ConfigError: a column does not exist, is named twice, or has an unsupported name in the result.
    """
    targets = list(keys.values())
    for name, target in keys.items():
        if name not in columns:
            raise ConfigError(f"data.keys: {root / INFO_PATH} has no column {name}. Columns: {', '.join(columns)}.")
        if targets.count(target) > 1 or target == Target.task:
            raise ConfigError(
                f"data.keys={{{name}: {target}}}: columns of a LeRobot data set can only be assigned to "
                f"{Target.action}, {Target.state} and {CAMERA}<camera>, one column to each."
            )
    named = {target: name for name, target in keys.items()}
    states = [name for name, column in columns.items() if "state" in name and len(column.shape) == 1]
    for target, known in ((Target.action, list(columns)), (Target.state, states)):
        if target not in named and target not in columns and known:
            raise ConfigError(
                f"No column is assigned to {target}. Set data.keys={{COLUMN: {target}, ...}}, where COLUMN is one of: "
                f"{', '.join(known)}."
            )
    return DemonstrationSettings(
        action_key=named.get(Target.action, "action"),
        state_key=named.get(Target.state, "observation.state"),
        cameras={target.removeprefix(CAMERA): name for name, target in keys.items() if target.startswith(CAMERA)},
        skip_nonfinite=skip_nonfinite,
    )
