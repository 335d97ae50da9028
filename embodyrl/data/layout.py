"""Folder layout of data sets: LeRobot dataset v3.0, and an additional file that describes the environment.

The layout is that of the `lerobot` package (`codebase_version` v3.0): files contain several episodes, and
`meta/episodes/` lists the file and the rows of each episode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter

from embodyrl.errors import EmbodyError
from embodyrl.files import write_atomically
from embodyrl.types import BoolArray, ByteArray, EnvSpec, FloatArray, IntArray

CODEBASE_VERSION = "v3.0"
CHUNKS_SIZE = 1000
"""Maximum number of files per chunk folder."""
DATA_FILE_MB, VIDEO_FILE_MB = 100, 200
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
INFO_PATH, STATS_PATH, TASKS_PATH = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
CARD_PATH = "meta/embodyrl.json"
ENVIRONMENT_PATH = "meta/environment.yaml"
"""File with the config of the environment in which the data were recorded."""
STATES_PATH = "meta/initial_states.npz"
"""File with the simulator's state before each episode of a converted data set, by number of the episode."""
STATE, ACTION, REWARD, DONE, SUCCESS = "observation.state", "action", "next.reward", "next.done", "next.success"
ACTOR = "embodyrl.actor"
"""Column of the data files with the author of each action, a value of `Actor`."""
UNDESCRIBED = "undescribed"
"""Key in `Card.collected` that marks a copy of third-party data with unknown gripper convention and image rotation."""
OWN = "embodyrl/"
"""Prefix of the columns in meta/episodes that only embodyrl writes, such as the fields of `Source`."""


class Actor(IntEnum):
    """Author of a recorded action."""

    unknown = -1
    """The author was not recorded: third-party data, or data of older versions."""
    policy = 0
    expert = 1
    """Action of the scripted expert, or its label for a state that another policy visited."""
    person = 2


_SCALARS = {
    REWARD: "float32",
    DONE: "bool",
    SUCCESS: "bool",
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
_ARROW: dict[str, pa.DataType] = {"float32": pa.float32(), "int64": pa.int64(), "bool": pa.bool_()}
_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Contents of `meta/embodyrl.json`: the environment's specification, and the settings of the collection."""

    env: EnvSpec
    fps: float
    video: bool
    """True if frames are stored in MP4 files instead of PNG bytes in the parquet files."""
    actors: bool = False
    """True if the data files have the column `ACTOR`."""
    without: tuple[str, ...] = ()
    """Names of the missing columns (`REWARD`, `SUCCESS`) if the source of the episodes did not contain them."""
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the dimensions of `STATE` and `ACTION`, if the source of the episodes has names."""
    collected: Mapping[str, Any] = field(default_factory=dict)
    """Settings that determine the episodes; a collection resumes only with equal settings."""

    def to_json(self) -> str:
        """Return the text of `meta/embodyrl.json`."""
        return json.dumps({**asdict(self), "env": _env_to_json(self.env)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Card:
        """Parse the result of `to_json`.

        Raises:
            ValueError, TypeError, KeyError: the text has another format.
        """
        raw = json.loads(text)
        card = cls(env=_env_from_json(raw.pop("env")), without=tuple(raw.pop("without", ())), **raw)
        card = TypeAdapter(cls).validate_python(asdict(card))
        if not 0 < card.fps < math.inf:
            raise ValueError(f"fps is {card.fps}, expected a positive number")
        return card


ENV_FIELDS = {
    "name": "name",
    "action_dim": "action.dim",
    "gripper": "action.gripper",
    "tasks": "tasks",
    "states_per_task": "states_per_task",
    "instructions": "instructions",
    "cameras": "cameras.names",
    "image_size": "cameras.size",
    "grey": "cameras.grey",
    "image_rotation_deg": "cameras.rotation_deg",
    "state_dim": "state_dim",
    "history": "history",
    "unnorm_key": "benchmark.unnorm_key",
    "max_episode_steps": "max_episode_steps",
}
"""Attribute path in `EnvSpec` of each key in `meta/embodyrl.json`."""
_OPTIONAL = ("instructions", "grey", "history", "unnorm_key", "max_episode_steps")


def _env_to_json(env: EnvSpec) -> dict[str, Any]:
    """Return the fields of an environment spec that describe the data, as JSON values."""
    fields = {name: attrgetter(path)(env) for name, path in ENV_FIELDS.items()}
    space = {name: getattr(env.action, name) for name in ("kind", "sizes", "low", "high")}
    return fields | {"gripper": env.action.gripper and asdict(env.action.gripper), "action_space": space}


def _env_from_json(raw: Mapping[str, Any]) -> EnvSpec:
    """Build the environment spec from the result of `_env_to_json`; files of earlier versions lack `_OPTIONAL`."""
    nested: dict[str, Any] = {"action": dict(raw.get("action_space") or {}), "cameras": {}, "benchmark": {}}
    for name, path in ENV_FIELDS.items():
        if name in raw or name not in _OPTIONAL:
            group, _, key = path.rpartition(".")
            (nested[group] if group else nested)[key] = raw[name]
    return TypeAdapter(EnvSpec).validate_python(nested)


def is_embodyrl_dataset(root: Path) -> bool:
    """Return True if embodyrl wrote the data set; its files then have additional fields."""
    return (root / CARD_PATH).is_file()


def image_key(camera: str) -> str:
    """Return the column name of a camera."""
    return f"observation.images.{camera}"


def get_pixel_format(size: tuple[int, int]) -> str:
    """Return the pixel format of H.264 videos; halved color planes need an even height and width."""
    return "yuv444p" if any(length % 2 for length in size) else "yuv420p"


def build_features(card: Card) -> dict[str, dict[str, Any]]:
    """Return the `features` of `meta/info.json`: dtype, shape and names of every column."""
    env = card.env
    height, width = env.cameras.size
    image: dict[str, Any] = {"dtype": "image", "shape": [height, width, 3], "names": ["height", "width", "channels"]}
    if card.video:
        codec = {
            "video.codec": "h264",
            "video.pix_fmt": get_pixel_format(env.cameras.size),
            "video.is_depth_map": False,
            "has_audio": False,
        }
        size = {"video.height": height, "video.width": width, "video.channels": 3, "video.fps": card.fps}
        image |= {"dtype": "video", "info": {**size, **codec}}
    features: dict[str, dict[str, Any]] = {image_key(camera): dict(image) for camera in env.cameras.names}
    if env.state_dim:
        features[STATE] = {"dtype": "float32", "shape": [env.state_dim], "names": card.names.get(STATE)}
    features[ACTION] = {"dtype": "float32", "shape": [env.action.dim], "names": card.names.get(ACTION)}
    scalars = {key: {"dtype": dtype, "shape": [1], "names": None} for key, dtype in _SCALARS.items()}
    scalars = {key: feature for key, feature in scalars.items() if key not in card.without}
    actor = {ACTOR: {"dtype": "int64", "shape": [1], "names": None}} if card.actors else {}
    return features | scalars | actor


def build_info(card: Card, *, episodes: int, frames: int, tasks: int) -> dict[str, Any]:
    """Return the content of `meta/info.json`."""
    return {
        "codebase_version": CODEBASE_VERSION,
        "robot_type": card.env.name,
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        "chunks_size": CHUNKS_SIZE,
        "data_files_size_in_mb": DATA_FILE_MB,
        "video_files_size_in_mb": VIDEO_FILE_MB,
        "fps": card.fps,
        "splits": {"train": f"0:{episodes}"},
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if card.video else None,
        "features": build_features(card),
    }


def build_schema(card: Card) -> pa.Schema:
    """Return the schema of the data files, with the image metadata of `datasets`."""
    fields: list[pa.Field] = []
    huggingface_features: dict[str, dict[str, Any]] = {}
    for key, feature in build_features(card).items():
        dtype, (length, *extra_dimensions) = feature["dtype"], feature["shape"]
        if dtype == "video":
            continue
        if dtype == "image":
            fields.append(pa.field(key, _IMAGE))
            huggingface_features[key] = {"_type": "Image"}
            continue
        assert not extra_dimensions, feature
        value = {"dtype": dtype, "_type": "Value"}
        # One-element vectors are plain columns in this layout.
        fields.append(pa.field(key, _ARROW[dtype] if length == 1 else pa.list_(_ARROW[dtype], length)))
        huggingface_features[key] = value if length == 1 else {"feature": value, "length": length, "_type": "Sequence"}
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": huggingface_features}})})


def build_tasks_table(tasks: list[str]) -> pa.Table:
    """Return the content of `meta/tasks.parquet`, in the format of a pandas data frame indexed by the instruction."""
    columns = [("task_index", "int64", "int64"), ("task", "unicode", "object")]
    column_metadata = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in columns
    ]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": column_metadata, "pandas_version": "2.2.0"}
    schema = pa.schema([("task_index", pa.int64()), ("task", pa.string())], metadata={"pandas": json.dumps(pandas)})
    return pa.table({"task_index": list(range(len(tasks))), "task": tasks}, schema=schema)


def get_dimension_names(feature: Mapping[str, Any]) -> list[str]:
    """Return the names of a column's dimensions, stored in the feature as one or several lists; empty without names."""
    names = feature.get("names") or ()
    parts = names.values() if isinstance(names, dict) else [names]
    return [str(name) for part in parts if isinstance(part, list | tuple) for name in part]


def get_file_indices(number: int) -> dict[str, int]:
    """Return the chunk index and the file index of file `number`, counted from 0."""
    return {"chunk_index": number // CHUNKS_SIZE, "file_index": number % CHUNKS_SIZE}


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically.

    Raises:
        EmbodyError: the folder cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise EmbodyError(
            f"Cannot write {path}: {error.strerror}. Earlier data is intact; free disk space or choose "
            "another folder, and run the same command again."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Origin of an episode: the values that are needed to repeat the episode."""

    task_id: int
    reset_id: int
    trial: int
    """Index of the planned episode within its task, from 0; demonstrations of a task are used in this order."""
    seed: int
    """Seed of the simulator's random number generator."""
    version: int = -1
    """Number of training steps of the weights at the first action; -1 if the policy has no weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One episode of T env steps: the observation before each action, the action, and its result."""

    images: ByteArray
    """[T, C, H, W, 3] uint8 in the simulator's orientation."""
    state: FloatArray
    """[T, S] proprioceptive state."""
    action: FloatArray
    """[T, A] actions in the environment's units and gripper convention."""
    reward: FloatArray
    """[T] reward of each step."""
    success: BoolArray | None
    """[T] True if the goal is reached after the action; None: unknown."""
    instruction: str
    source: Source
    actor: IntArray | Actor = Actor.policy
    """[T] `Actor` of each action, or one value for all actions."""

    def __len__(self) -> int:
        return len(self.action)
