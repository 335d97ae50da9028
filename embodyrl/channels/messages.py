"""Messages between driver and workers. Messages are small, frozen and picklable; arrays stay in the arena.

Messages have no `__slots__`: pickling frozen dataclasses with slots is several times slower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from embodyrl.channels.arena import RecordRefs
from embodyrl.channels.layout import (
    BUCKET,
    OBSERVATION,
    POLICY_OUTPUT,
    STATE,
    STEP_RESULT,
    Record,
    WeightInfo,
    WeightPart,
)
from embodyrl.types import EpisodeStart, IntArray

_MAX_LIST_LENGTH = 64
"""Maximum length of arrays that `to_list_if_short` converts to lists; longer arrays are pickled faster than lists."""
POLICY_FOLDER = "policy"
"""Name of the subfolder with the policy in the folder of a SaveRequest."""


@dataclass(frozen=True, kw_only=True)
class WorkerReady:
    """Message of a worker that is built and ready for requests."""

    task_limit: int | None = None
    """Env workers: maximum number of distinct tasks in all environments at a time; None: unlimited."""
    weights: tuple[WeightInfo, ...] = ()
    """Disaggregated mode: names, dtypes and sizes of this process's weights."""


@dataclass(frozen=True, kw_only=True)
class WorkerFailed:
    """Message of a worker that raised an exception and exits afterwards."""

    error: str
    traceback: str
    exit_code: int = 1


@dataclass(frozen=True, kw_only=True)
class ResetRequest:
    """Request to start an episode in an environment and to write the first observation to the record `target`."""

    env_index: int
    start: EpisodeStart
    target: int
    video_stem: str | None = None
    """Path prefix of the video <prefix>_<outcome>_<steps>steps.mp4 of all env steps; None: no video."""
    keep_video: str = "all"
    """Episodes whose video is kept: all or failures."""


def to_list_if_short(values: IntArray) -> Sequence[int] | IntArray:
    """Convert a short array to a list, which is pickled several times faster; return a long array unchanged."""
    return values.tolist() if len(values) <= _MAX_LIST_LENGTH else values


class RecordAccess(NamedTuple):
    """Access of a request to records: references, and the fields that the worker reads or writes."""

    record_refs: RecordRefs
    fields: tuple[str, ...] | None = ()
    """Names of the fields; None: all fields."""
    pool: int = 0
    """Index of the shared memory that contains the records (0: arena, 1: weight buckets)."""
    length: int | None = None
    """Number of used bytes of a bucket; None: all bytes."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request to a worker, whose reply has the same sequence number.

    Workers on the driver's host map the driver's arena. For other hosts, records are transferred
    (`cluster/ray_cluster/launcher.py`), so each request class declares the fields that its worker reads and writes.
    """

    sequence: int = 0
    """Sequence number of the request, set by the sender."""
    read_fields: ClassVar[Mapping[str, tuple[str, ...] | None]] = {}
    """Record fields that the worker reads, by name of the request attribute that contains the record references;
    None: all fields. The state of a record is always included."""
    written_fields: ClassVar[Mapping[str, tuple[str, ...] | None]] = {}
    """Record fields that the worker writes, by name of the request attribute that contains the references."""
    pool: ClassVar[int] = 0
    """Index of the shared memory that contains the records (see `RecordAccess.pool`)."""

    @property
    def label(self) -> str:
        """Name of the request for log messages and traces."""
        return type(self).__name__.removesuffix("Request").lower()

    def get_read_access(self) -> tuple[RecordAccess, ...]:
        """Return the record fields that the worker reads."""
        return self._get_accesses(self.read_fields)

    def get_write_access(self) -> tuple[RecordAccess, ...]:
        """Return the record fields that the worker writes."""
        return self._get_accesses(self.written_fields)

    def _get_accesses(self, fields: Mapping[str, tuple[str, ...] | None]) -> tuple[RecordAccess, ...]:
        return tuple(
            RecordAccess(np.atleast_1d(getattr(self, name)), names, self.pool) for name, names in fields.items()
        )


@dataclass(frozen=True, kw_only=True)
class EnvRequest(Request):
    """Request to one stage (environments that step together) of an env worker: run chunks, then reset environments."""

    stage: int
    env_indices: Sequence[int] | IntArray = ()
    """[n] environments that execute the chunks in `sources`; the next observations are written to `targets`."""
    sources: RecordRefs = ()
    targets: RecordRefs = ()
    resets: tuple[ResetRequest, ...] = ()

    read_fields = {"sources": (Record.action, Record.reply, Record.cut_off), "observed": ()}
    # A scripted expert acts in the simulator: its actions are an output.
    written_fields = {
        "sources": (Record.action, *STEP_RESULT, Record.components),
        "observed": (*OBSERVATION, STATE),
    }

    @property
    def label(self) -> str:
        """Name of the request in log messages and traces: `chunk` or `reset`."""
        return "chunk" if len(self.env_indices) else "reset"

    @property
    def observed(self) -> RecordRefs:
        """Record references of all records that receive an observation, after a chunk or a reset."""
        return np.append(self.targets, [reset.target for reset in self.resets]).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Path of an episode's finished video, or the problem that prevented the recording."""

    env_index: int
    path: str | None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class EnvReport:
    """Reply to an EnvRequest with timings and videos of its stage; the results of env steps are in the arena."""

    sequence: int
    stage: int
    sim_s: float
    render_s: float
    reset_s: float
    recordings: tuple[Recording, ...] = ()
    reward_errors: tuple[tuple[int, str], ...] = ()
    """(environment, error message) of each environment whose reward function failed."""
    solved: tuple[int, ...] = ()
    """Environments that were reset to a state in which the goal is already reached."""


@dataclass(frozen=True, kw_only=True)
class InferRequest(Request):
    """Request to compute actions for a batch of observations, and to write them into the observations' records."""

    record_refs: RecordRefs
    """[n] references of the records with the observations; `noise_seeds` and `chunk_indices` also have length n."""
    noise_seeds: Sequence[int] | IntArray
    chunk_indices: Sequence[int] | IntArray
    """[n] index of the next chunk in each episode, starting at 0."""
    greedy: bool
    version: int
    temperature: float | None = None
    """Sampling temperature; None: the training temperature."""
    padded_size: int = 0
    """Batch size after padding; 0: no padding."""
    rows: Sequence[int] | IntArray = ()
    """[n] row of each record reference in the padded batch."""

    read_fields = {"record_refs": OBSERVATION}
    written_fields = {"record_refs": POLICY_OUTPUT}


@dataclass(frozen=True, kw_only=True)
class ValueRequest(Request):
    """Request to predict the value of each observation and to write the value into the same record."""

    record_refs: RecordRefs
    padded_size: int = 0

    read_fields = {"record_refs": OBSERVATION}
    written_fields = {"record_refs": (Record.value,)}


@dataclass(frozen=True, kw_only=True)
class ScoreRequest(Request):
    """Request to compute log-probabilities under the reference policy and to write them into the records."""

    record_refs: RecordRefs

    read_fields = {"record_refs": (*OBSERVATION, Record.tokens)}
    written_fields = {"record_refs": (Record.ref_logprob,)}


@dataclass(frozen=True, kw_only=True)
class UpdateRequest(Request):
    """Request to train on a batch of records that contain advantages."""

    step: int
    record_refs: RecordRefs
    episode: Sequence[int] | IntArray
    """Episode id of each record reference."""
    finals: tuple[tuple[int, int], ...] = ()
    """Off-policy: (episode id, record reference of the final observation) of each ended episode; terminated episodes
    are included only with hindsight."""
    earlier: tuple[tuple[int, int], ...] = ()
    """Hindsight: (episode id, number in `open` of an earlier request) of each continued episode."""
    open: tuple[tuple[int, int], ...] = ()
    """Hindsight: (episode id, unique number) of each episode that may continue in a later request."""
    in_parts: bool = False
    """Reply after each micro-batch and wait for a ContinueRequest, so that inference can be interleaved."""

    # All fields: the fields that an update reads depend on the algorithm.
    read_fields = {"record_refs": None, "last": OBSERVATION}

    @property
    def last(self) -> RecordRefs:
        """Record references of the final observations in `finals`."""
        return np.array([record_ref for _, record_ref in self.finals], np.int64)


@dataclass(frozen=True, kw_only=True)
class ImitateRequest(Request):
    """Request to train with SFT on records that contain observations and target actions or replies."""

    step: int
    record_refs: RecordRefs
    augment: tuple[int, ...] = ()
    """Seeds of image augmentation, one for every `actor.micro_batch_size` samples; empty: no augmentation."""
    train: bool = True
    """If False, only evaluate, and reply with the sums of loss and accuracy."""

    read_fields = {"record_refs": (*OBSERVATION, Record.action, Record.reply, Record.success)}


@dataclass(frozen=True, kw_only=True)
class ContinueRequest(Request):
    """Request to run the next part of the current update."""


@dataclass(frozen=True, kw_only=True)
class SaveRequest(Request):
    """Request to write the policy, the optimizer and the RNG state to `folder`."""

    folder: str


@dataclass(frozen=True, kw_only=True)
class LoadRequest(Request):
    """Request to load the files that a SaveRequest wrote into `folder`."""

    folder: str


@dataclass(frozen=True, kw_only=True)
class BucketRequest(Request):
    """Request to transfer parts of the weights through a bucket."""

    record_ref: int
    parts: tuple[WeightPart, ...]

    pool = 1

    def _get_accesses(self, fields: Mapping[str, tuple[str, ...] | None]) -> tuple[RecordAccess, ...]:
        # A small policy fills a small part of its only bucket.
        return tuple(access._replace(length=self.parts[-1].end) for access in super()._get_accesses(fields))


@dataclass(frozen=True, kw_only=True)
class PublishRequest(BucketRequest):
    """Request to write parts of the trained weights into a bucket."""

    read_fields = {"record_ref": ()}
    written_fields = {"record_ref": (BUCKET, STATE)}


@dataclass(frozen=True, kw_only=True)
class LoadWeightsRequest(BucketRequest):
    """Request to load the weights in a bucket for inference."""

    read_fields = {"record_ref": (BUCKET,)}


@dataclass(frozen=True, kw_only=True)
class Done:
    """Reply to a request other than an EnvRequest, with duration and metrics."""

    sequence: int
    seconds: float
    metrics: dict[str, float]
    error: str = ""
    """Error message of a failed checkpoint request, after which the worker continues; empty: no error."""
    finished: bool = True
    """If False, the update is not finished and waits for a ContinueRequest."""


Reply = WorkerReady | WorkerFailed | EnvReport | Done
"""Types of messages that a worker sends."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Rank of a process in a process group, and address of the group's rendezvous store."""

    rank: int = 0
    world: int = 1
    host: str = ""
    """Host of the rendezvous store; empty: a single rank."""
    port: int = 0
    secret: bytes = field(default=b"", repr=False)
    """Secret of the store's authenticated proxy (`channels/rendezvous.py`); empty: no proxy."""
    timeout_s: float = 3600.0
    """Timeout of a collective operation in seconds."""

    # Round-robin: the numbers of slices of the ranks differ by at most one.
    def get_slices(self, count: int, size: int) -> list[slice]:
        """Split `count` items into slices of at most `size` items, and return the slices of this rank."""
        return [slice(start, start + size) for start in range(self.rank * size, count, self.world * size)]
