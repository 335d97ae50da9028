"""Messages between driver and workers: small, frozen, picklable. Arrays stay in the arena.

Messages have no slots: pickling frozen dataclasses with slots is several times slower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from embodyrl.channels.arena import Tickets
from embodyrl.channels.layout import BUCKET, DECISION, OBSERVATION, STATE, STEP_RESULT, Record, WeightInfo, WeightPart
from embodyrl.types import EpisodeStart, IntArray

_LIST_LENGTH = 64
"""Longer arrays are pickled faster than lists."""
POLICY_FOLDER = "policy"
"""Subfolder with the policy in the folder of a SaveRequest."""


@dataclass(frozen=True, kw_only=True)
class WorkerReady:
    """The worker is built and ready for requests."""

    task_limit: int | None = None
    """Env workers: maximum number of distinct tasks in the slots; None: unlimited."""
    weights: tuple[WeightInfo, ...] = ()
    """Disaggregated mode: names, dtypes and sizes of this process's weights."""


@dataclass(frozen=True, kw_only=True)
class WorkerFailed:
    """The worker raised an exception and exits after this message."""

    error: str
    traceback: str
    exit_code: int = 1


@dataclass(frozen=True, kw_only=True)
class ResetRequest:
    """Start an episode in a slot; the first observation is written to `target`."""

    slot: int
    start: EpisodeStart
    target: int
    video_stem: str | None = None
    """Record every env step to <stem>_<outcome>_<steps>steps.mp4."""
    keep_video: str = "all"
    """Outcomes whose recordings are kept: all or failures."""


def portable(values: IntArray) -> Sequence[int] | IntArray:
    """Return a short array as a list, which is pickled several times faster."""
    return values.tolist() if len(values) <= _LIST_LENGTH else values


class Use(NamedTuple):
    """Record fields that a worker reads or writes for a request."""

    tickets: Tickets
    fields: tuple[str, ...] | None = ()
    """Names of the fields; None: all fields."""
    pool: int = 0
    """Index of the shared memory: 0 is the arena, 1 the weight buckets."""
    length: int | None = None
    """Number of used bytes of a bucket; None: all bytes."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request to a worker, whose reply has the same sequence number.

    Workers on the driver's host map the driver's arena. For other hosts, records are transferred
    (`extensions/ray_cluster/launcher.py`), so each request class declares the fields that its worker reads and writes.
    """

    sequence: int = 0
    """Sequence number, set by the sender."""
    read_fields: ClassVar[Mapping[str, tuple[str, ...] | None]] = {}
    """Record fields that the worker reads, by name of the request attribute that holds the tickets of the records. The
    state of a record is always included."""
    written_fields: ClassVar[Mapping[str, tuple[str, ...] | None]] = {}
    """Record fields that the worker writes, by name of the request attribute that holds the tickets of the records."""
    pool: ClassVar[int] = 0
    """See `Use`."""

    @property
    def label(self) -> str:
        """Name of the request for messages and traces."""
        return type(self).__name__.removesuffix("Request").lower()

    def reads(self) -> tuple[Use, ...]:
        """Return the record fields that the worker reads."""
        return self._uses(self.read_fields)

    def writes(self) -> tuple[Use, ...]:
        """Return the record fields that the worker writes."""
        return self._uses(self.written_fields)

    def _uses(self, fields: Mapping[str, tuple[str, ...] | None]) -> tuple[Use, ...]:
        return tuple(Use(np.atleast_1d(getattr(self, name)), names, self.pool) for name, names in fields.items())


@dataclass(frozen=True, kw_only=True)
class EnvRequest(Request):
    """Work for one stage (a group of slots that step together) of an env worker: chunk steps, then resets."""

    stage: int
    slots: Sequence[int] = ()
    """[n] slots that execute the chunks in the records of `sources`; the next observations are written to `targets`."""
    sources: Tickets = ()
    targets: Tickets = ()
    resets: tuple[ResetRequest, ...] = ()

    read_fields = {"sources": (Record.action, Record.reply, Record.cut_off), "observed": ()}
    # A scripted expert acts in the simulator: its actions are an output.
    written_fields = {
        "sources": (Record.action, *STEP_RESULT, Record.components),
        "observed": (*OBSERVATION, STATE),
    }

    @property
    def label(self) -> str:
        """See `Request.label`."""
        return "chunk" if len(self.slots) else "reset"

    @property
    def observed(self) -> Tickets:
        """Tickets (record ids) of all records that receive an observation, also after a reset."""
        return np.append(self.targets, [one.target for one in self.resets]).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A finished video recording, or the reason why there is none."""

    slot: int
    path: str | None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class EnvReport:
    """Reply to an EnvRequest with the report of its stage; the results are in the arena."""

    sequence: int
    stage: int
    sim_s: float
    render_s: float
    reset_s: float
    recordings: tuple[Recording, ...] = ()
    reward_errors: tuple[tuple[int, str], ...] = ()
    """(slot, error message) of each slot whose reward function failed."""
    solved: tuple[int, ...] = ()
    """Slots that were reset to a state in which the goal is already reached."""


@dataclass(frozen=True, kw_only=True)
class InferRequest(Request):
    """Compute actions for a batch and write the actions into the records of the observations."""

    tickets: Tickets
    """[n] tickets of the observations' records; `noise_seeds` and `chunks` also have length n."""
    noise_seeds: Sequence[int] | IntArray
    chunks: Sequence[int] | IntArray
    """[n] number of earlier chunks of each episode."""
    greedy: bool
    version: int
    temperature: float | None = None
    """Sampling temperature; None: the training temperature."""
    padded_size: int = 0
    """Fixed batch size; 0: the number of tickets."""
    rows: Sequence[int] | IntArray = ()
    """[n] row of each ticket in the padded batch."""

    read_fields = {"tickets": OBSERVATION}
    written_fields = {"tickets": DECISION}


@dataclass(frozen=True, kw_only=True)
class ValueRequest(Request):
    """Write the value of each observation into its record."""

    tickets: Tickets
    padded_size: int = 0

    read_fields = {"tickets": OBSERVATION}
    written_fields = {"tickets": (Record.value,)}


@dataclass(frozen=True, kw_only=True)
class ScoreRequest(Request):
    """Write the reference policy's log-probabilities into each record."""

    tickets: Tickets

    read_fields = {"tickets": (*OBSERVATION, Record.tokens)}
    written_fields = {"tickets": (Record.ref_logprob,)}


@dataclass(frozen=True, kw_only=True)
class UpdateRequest(Request):
    """Train on a batch whose advantages are in the records."""

    step: int
    tickets: Tickets
    episode: Sequence[int] | IntArray
    """Episode id of each ticket."""
    finals: tuple[tuple[int, int], ...] = ()
    """Off-policy: (episode id, ticket of the final observation); terminated episodes are included only with
    hindsight."""
    earlier: tuple[tuple[int, int], ...] = ()
    """Hindsight: (episode id, index in `open` of the earlier request) of each continued episode."""
    open: tuple[tuple[int, int], ...] = ()
    """Hindsight: (episode id, unique number) of each episode that may continue in a later request."""
    in_parts: bool = False
    """Reply after each micro-batch and wait for a ContinueRequest, so that inference can be interleaved."""

    # All fields: the fields that an update reads depend on the algorithm.
    read_fields = {"tickets": None, "last": OBSERVATION}

    @property
    def last(self) -> Tickets:
        """Tickets of the final observations in `finals`."""
        return np.array([ticket for _, ticket in self.finals], np.int64)


@dataclass(frozen=True, kw_only=True)
class ImitateRequest(Request):
    """Train with SFT on records with an observation and the target actions or replies."""

    step: int
    tickets: Tickets
    augment: tuple[int, ...] = ()
    """Seeds of image augmentation, one for every `actor.micro_batch_size` samples; empty: none."""
    learn: bool = True
    """False: evaluate only; reply with the sums of loss and accuracy."""

    read_fields = {"tickets": (*OBSERVATION, Record.action, Record.reply, Record.success)}


@dataclass(frozen=True, kw_only=True)
class ContinueRequest(Request):
    """Run the next part of the current update."""


@dataclass(frozen=True, kw_only=True)
class SaveRequest(Request):
    """Write policy, optimizer and RNG state in `folder`."""

    folder: str


@dataclass(frozen=True, kw_only=True)
class LoadRequest(Request):
    """Load the files of a SaveRequest."""

    folder: str


@dataclass(frozen=True, kw_only=True)
class BucketRequest(Request):
    """Request to transfer parts of the weights through a bucket."""

    ticket: int
    parts: tuple[WeightPart, ...]

    pool = 1

    def _uses(self, fields: Mapping[str, tuple[str, ...] | None]) -> tuple[Use, ...]:
        # A small policy fills a small part of its only bucket.
        return tuple(use._replace(length=self.parts[-1].end) for use in super()._uses(fields))


@dataclass(frozen=True, kw_only=True)
class PublishRequest(BucketRequest):
    """Write parts of the trained weights into a bucket."""

    read_fields = {"ticket": ()}
    written_fields = {"ticket": (BUCKET, STATE)}


@dataclass(frozen=True, kw_only=True)
class LoadWeightsRequest(BucketRequest):
    """Load the parts of the weights in a bucket, for inference."""

    read_fields = {"ticket": (BUCKET,)}


@dataclass(frozen=True, kw_only=True)
class Done:
    """Reply to a policy request."""

    sequence: int
    seconds: float
    metrics: dict[str, float]
    error: str = ""
    """Error of a checkpoint request; the worker continues."""
    finished: bool = True
    """False: the update is not finished and waits for a ContinueRequest."""


Reply = WorkerReady | WorkerFailed | EnvReport | Done
"""Messages that a worker sends."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Rank of a process, and address of the rendezvous."""

    rank: int = 0
    world: int = 1
    host: str = ""
    """Host of the rendezvous store; empty: a single rank."""
    port: int = 0
    secret: bytes = field(default=b"", repr=False)
    """Secret of the authenticated proxy (`extensions/sharded/rendezvous.py`); empty: the store is on this host."""
    timeout_s: float = 3600.0
    """Timeout of a collective."""

    # Round-robin: the ranks get equally many parts, or differ by one part.
    def share(self, count: int, size: int) -> list[slice]:
        """Return this rank's slices of `count` items, each of at most `size` items."""
        return [slice(start, start + size) for start in range(self.rank * size, count, self.world * size)]
