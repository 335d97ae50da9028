"""Load data sets into memory with decoded frames, so that a batch is a single indexing operation."""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embodyrl.data import layout
from embodyrl.data.cards import PLAIN, read_stored_card
from embodyrl.data.checks import check_layout
from embodyrl.data.executed_actions import get_executed_actions
from embodyrl.data.frames import decode_png
from embodyrl.data.layout import Card
from embodyrl.data.rows import Rows, find_rows, read_columns, read_success, read_vectors
from embodyrl.data.settings import DemonstrationSettings
from embodyrl.data.tables import read_episodes, read_info, read_tasks
from embodyrl.data.videos import VideoReader
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.files import available_bytes, available_cores, inside, read_small
from embodyrl.types import BoolArray, ByteArray, FloatArray, GripperConvention, IntArray, Observation

_MEMORY_SHARE = 0.8
"""Maximum fraction of the free memory for decoded frames."""

_Episodes = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Demonstrations in memory: N env steps of E episodes, one episode after another."""

    images: ByteArray
    """[N, C, H, W, 3] uint8 in the simulator's orientation."""
    state: FloatArray
    """[N, S] proprioceptive state."""
    action: FloatArray
    """[N, A] actions in the environment's units."""
    reward: FloatArray
    """[N] rewards; 0 if the data set has no rewards."""
    success: BoolArray
    """[N] True if the goal is reached after the action; False if the data set has no such column."""
    start: IntArray
    """[E] index of the first env step of each episode."""
    stop: IntArray
    """[E] end index of each episode (exclusive)."""
    instruction: npt.NDArray[np.object_]
    """[N] instruction of each step; an episode may have several."""
    actor: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[N] author of each action, as a value of `Actor`; empty for text."""
    reset_id: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[E] reset id (initial state) of each episode; -1 for third-party data sets; empty for text."""
    executed: FloatArray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """[N, A] executed actions, which differ from the labels in `action` by model.expert_noise; empty for text."""
    skipped: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Indices of the skipped episodes with non-finite numbers."""
    warnings: tuple[str, ...] = ()
    """Warnings about probable mistakes in the data, one line each."""

    @property
    def num_episodes(self) -> int:
        """Number of episodes, E."""
        return len(self.start)

    @property
    def longest(self) -> int:
        """Number of env steps of the longest successful episode, or of the longest episode if none is successful."""
        length = self.stop - self.start
        is_success = np.array([self.success[a:b].any() for a, b in zip(self.start, self.stop, strict=True)], np.bool_)
        return int(length[is_success].max(initial=0) or length.max(initial=0))

    @property
    def is_solved(self) -> BoolArray:
        """[N] True if the goal is reached in the observation (after the previous action); False at the first step."""
        # A frame shows the result of the action before it; the first frame shows no result.
        is_solved = np.roll(self.success, 1)
        is_solved[self.start] = False
        return is_solved

    def get_steps(self, episodes: Sequence[int]) -> IntArray:
        """Return the indices of all env steps of the given episodes."""
        return np.concatenate([np.arange(self.start[episode], self.stop[episode]) for episode in episodes])

    def observations(self, steps: IntArray) -> Observation:
        """Return the observations of `steps` [B]."""
        instructions = tuple(str(text) for text in self.instruction[steps])
        return Observation(images=self.images[steps], state=self.state[steps], instructions=instructions)

    def chunks(self, steps: IntArray, length: int) -> FloatArray:
        """Return the action chunks [B, K, A] that begin at `steps` [B], padded with the last action of the episode."""
        return self.action[self.window(steps, length)[0]]

    def window(self, steps: IntArray, length: int, *, before: int = 0) -> tuple[IntArray, BoolArray]:
        """Return the step indices [B, K] of one window per step in `steps` [B], and a mask [B, K].

        A window begins `before` steps before its step. The mask is False for padding, which repeats the first or the
        last step of the episode.
        """
        episode = np.searchsorted(self.stop, steps, side="right")
        unclipped = steps[:, None] + np.arange(-before, length - before)
        clipped = np.clip(unclipped, self.start[episode][:, None], self.stop[episode][:, None] - 1)
        return clipped, clipped == unclipped

    def get_ranked_pairs(self, episodes: Sequence[int], length: int) -> IntArray:
        """Return pairs [M, 2] of chunk starts: one in a better, one in a worse episode from the same initial state.

        A success is better than a failure; otherwise the higher return is better. Both chunks of a pair begin at the
        same env step of their episodes, up to the length of the shorter episode.
        """
        steps = {e: slice(self.start[e], self.stop[e]) for e in episodes}
        outcomes = {e: (bool(self.success[s].any()), float(self.reward[s].sum())) for e, s in steps.items()}
        pairs = [
            np.stack([self.start[e] + offsets, self.start[other] + offsets], axis=1)
            for e in episodes
            for other in episodes
            if self.reset_id[e] == self.reset_id[other] >= 0 and outcomes[e] > outcomes[other]
            for offsets in [np.arange(0, min(self.stop[i] - self.start[i] for i in (e, other)), length)]
        ]
        return np.concatenate([np.zeros((0, 2), np.int64), *pairs])


def load_demonstrations(
    root: Path, data: DemonstrationSettings = PLAIN, *, only: Collection[int] | None = None
) -> Demonstrations:
    """Load all episodes, or only the episodes with an index in `only`; frames are decoded to uint8 in memory.

    Raises:
        EmbodyError: the folder does not follow the layout, is empty or damaged, or has non-finite numbers; or the
            frames do not fit into the free memory.
    """
    card, is_own = read_stored_card(root, data), layout.is_embodyrl_dataset(root)
    fix = "Collect the data set again, or resume its collection." if is_own else "Download the data set again."
    if problems := check_layout(root, data):
        rest = f" ({len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise EmbodyError(f"{root} is damaged: {problems[0]}{rest} {fix}")
    episodes = read_episodes(root)
    if not episodes:
        raise EmbodyError(f"{root} contains no episodes. {fix}")
    rows, env = find_rows(root, episodes), card.env
    warnings = [] if is_own else find_episode_count_warnings(root, len(episodes))
    action = read_vectors(rows, data.action_key, env.action.dim, warnings)
    state = read_vectors(rows, data.state_key, env.state_dim, warnings)
    numbers = {data.action_key: action, data.state_key: state}
    if layout.REWARD not in card.without:
        numbers[layout.REWARD] = read_vectors(rows, layout.REWARD, 1)
    skipped = _find_skipped(root, rows, episodes, numbers, skip=data.skip_nonfinite)
    if data.gripper is not None:
        check_gripper(str(root), env.action.gripper, action)
    selected = [
        episode
        for episode in episodes
        if episode["episode_index"] not in skipped and (only is None or episode["episode_index"] in only)
    ]
    if not selected:
        raise EmbodyError(f"{root}: every episode contains a non-finite number. Correct the data.")
    selected_rows = np.concatenate(
        [np.arange(episode["dataset_from_index"], episode["dataset_to_index"]) for episode in selected]
    )
    reward, length = numbers.get(layout.REWARD), len(selected_rows)
    has_success, names = layout.SUCCESS not in card.without, read_tasks(root)
    unknown_actors = np.full(length, layout.Actor.unknown, np.int64)
    stop = np.cumsum([episode["length"] for episode in selected])
    videos = VideoReader(root, card, rows, episodes)
    images = _read_frames(root, card, data, rows, selected, selected_rows, videos)
    return Demonstrations(
        images=images,
        state=state[selected_rows],
        action=action[selected_rows],
        executed=get_executed_actions(card, selected, action[selected_rows]),
        reward=np.zeros(length, np.float32) if reward is None else reward[selected_rows, 0],
        success=read_success(rows)[selected_rows] if has_success else np.zeros(length, np.bool_),
        actor=read_vectors(rows, layout.ACTOR, 1)[selected_rows, 0].astype(np.int64) if card.actors else unknown_actors,
        start=np.concatenate([[0], stop[:-1]]).astype(np.int64),
        stop=stop.astype(np.int64),
        instruction=np.array([names[task] for task in rows.indices["task_index"][selected_rows].tolist()], object),
        reset_id=np.array([episode.get(f"{layout.OWN}reset_id", -1) for episode in selected], np.int64),
        skipped=np.array(sorted(skipped), np.int64),
        warnings=(*warnings, *videos.warnings),
    )


def _find_skipped(
    root: Path, rows: Rows, episodes: _Episodes, numbers: dict[str, FloatArray], *, skip: bool
) -> set[int]:
    """Return the indices of the episodes that contain non-finite values.

    Raises:
        EmbodyError: such episodes exist and `data.skip_nonfinite` is false.
    """
    invalid = [
        (name, row)
        for name, values in numbers.items()
        for row in np.flatnonzero(~np.isfinite(values).all(axis=1)).tolist()
    ]
    skipped = {int(rows.indices["episode_index"][row]) for _, row in invalid}
    if invalid and not skip:
        name, row = invalid[0]
        dimension = np.flatnonzero(~np.isfinite(numbers[name][row]))[0]
        raise EmbodyError(
            f"{root}: {_describe_step(rows, episodes, row)}: {name}[{dimension}] is {numbers[name][row, dimension]} "
            f"({len(invalid)} such rows in {len(skipped)} episodes). Correct the data, or set "
            "data.skip_nonfinite=true to skip these episodes."
        )
    return skipped


def _describe_step(rows: Rows, episodes: _Episodes, row: int) -> str:
    """Return the episode and the step of a row, for error messages."""
    episode = rows.indices["episode_index"][row]
    start = next(entry["dataset_from_index"] for entry in episodes if entry["episode_index"] == episode)
    return f"episode {episode}, step {row - start}"


def find_episode_count_warnings(root: Path, episodes: int) -> list[str]:
    """Return a warning if a third-party data set declares a number of episodes that differs from its content."""
    declared = read_info(root).get("total_episodes", episodes)
    if declared == episodes:
        return []
    file = root / layout.INFO_PATH
    return [f"{file} declares {declared} episodes, but meta/episodes has {episodes}: is the data set complete?"]


def check_gripper(where: str, gripper: GripperConvention | None, action: FloatArray) -> None:
    """Check that the gripper actions of third-party data follow the gripper convention.

    Raises:
        ConfigError: an action violates the convention.
    """
    if gripper is None:
        return
    values = action[:, gripper.index]
    values = values[np.isfinite(values)]
    low, high = sorted((gripper.open, gripper.closed))
    slack, distinct = 0.02 * (high - low), np.unique(values)
    between = len(distinct) < 3 and ((distinct > low + slack) & (distinct < high - slack)).any()
    if len(distinct) and (between or distinct[0] < low - slack or distinct[-1] > high + slack):
        raise ConfigError(
            f"data.gripper=[{gripper.open:g},{gripper.closed:g}] does not match action {gripper.index} of {where}, "
            f"which is in {distinct[0]:g}..{distinct[-1]:g}. Set data.gripper to the actions that open and close the "
            "gripper, or set data.gripper_index."
        )


def find_gripper_warnings(gripper: GripperConvention | None, action: FloatArray) -> tuple[str, ...]:
    """Return a warning if the gripper actions in `action` [N, A] cover at most half of the declared range."""
    if gripper is None or not len(action):
        return ()
    values = action[:, gripper.index]
    low, high = float(values.min()), float(values.max())
    if high - low > 0.52 * abs(gripper.open - gripper.closed):
        return ()
    range_text = f"is always {low:g}" if low == high else f"is in {low:g}..{high:g} only"
    return (
        f"data.gripper=[{gripper.open:g},{gripper.closed:g}]: action {gripper.index} of the data {range_text}. Check "
        "data.gripper and data.gripper_index.",
    )


def _read_frames(
    root: Path,
    card: Card,
    data: DemonstrationSettings,
    rows: Rows,
    episodes: _Episodes,
    selected_rows: IntArray,
    videos: VideoReader,
) -> ByteArray:
    """Decode the frames of the rows in `selected_rows`, in order."""
    shape = (len(selected_rows), len(card.env.cameras.names), *card.env.cameras.size, 3)
    _require_memory(root, int(np.prod(shape)))
    # Decode in place: stacking a list of frames would take twice the memory.
    images = np.empty(shape, np.uint8)
    columns = [data.cameras.get(camera, layout.image_key(camera)) for camera in card.env.cameras.names]
    if card.video:
        for camera, column in enumerate(columns):
            videos.read(column, episodes, images[:, camera])
        return images
    position = np.full(len(rows), -1, np.int64)
    position[selected_rows] = np.arange(len(selected_rows))
    with ThreadPoolExecutor(available_cores()) as pool:
        for number, path in enumerate(rows.files if columns else ()):
            in_file = np.flatnonzero((rows.file == number) & (position >= 0))
            if not len(in_file):
                continue
            in_file = in_file[np.argsort(rows.row_in_file[in_file])]
            table = read_columns(path, columns)
            for camera, column in enumerate(columns):
                values = table[column].take(rows.row_in_file[in_file])
                decoded = pool.map(partial(_decode, root), values, [images[row, camera] for row in position[in_file]])
                for row in in_file:
                    try:
                        next(decoded)
                    except EmbodyError as error:
                        where = f"{root}: {_describe_step(rows, episodes, row)}: '{column}'"
                        raise EmbodyError(f"{where}: {error}") from error
    return images


def _decode(root: Path, value: Any, out: ByteArray) -> None:
    """Decode an image, stored as its bytes or as the path of a file, into `out` [H, W, 3]."""
    stored = value.as_py()
    stored = stored if isinstance(stored, dict) else {"bytes": stored}
    content, path = stored.get("bytes"), stored.get("path")
    if content is None and path:
        try:
            content = read_small(inside(root, path))
        except (OSError, ValueError) as error:
            raise EmbodyError(f"the image cannot be read: {error}. Download the data set again.") from error
    if not isinstance(content, bytes):
        raise EmbodyError("there is no image. Download the data set again.")
    decode_png(content, out)


def join_demonstrations(parts: Sequence[Demonstrations]) -> Demonstrations:
    """Concatenate data sets of one environment."""
    if len(parts) == 1:
        return parts[0]
    offsets = np.cumsum([0, *(len(part.images) for part in parts[:-1])])
    shifted = [
        replace(part, start=part.start + offset, stop=part.stop + offset)
        for part, offset in zip(parts, offsets, strict=True)
    ]
    names = [part.name for part in fields(Demonstrations) if part.name != "warnings"]
    joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in shifted]) for name in names}
    return Demonstrations(**joined, warnings=tuple(warning for part in parts for warning in part.warnings))


def _require_memory(root: Path, needed: int) -> None:
    free = available_bytes()
    if needed > _MEMORY_SHARE * free:
        raise EmbodyError(
            f"{root}: the decoded frames need {needed / 2**30:.1f} GiB of memory, but only {free / 2**30:.1f} GiB are "
            "free. Collect smaller images (env.init_params) or fewer episodes."
        )
