"""The messages between driver and workers: small, frozen, picklable.

Arrays stay in the arena. Messages have no slots, because those of a frozen dataclass are pickled by Python code,
several times slower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from embodyrl.channels.arena import Tickets
from embodyrl.channels.layout import BUCKET, DECISION, OBSERVATION, STATE, STEP_RESULT, Record, WeightInfo, WeightPart
from embodyrl.types import EpisodeStart, IntArray

POLICY_FOLDER = "policy"
"""Where a SaveRequest puts the policy below its folder."""


@dataclass(frozen=True, kw_only=True)
class WorkerReady:
    """The worker is built."""

    task_limit: int | None = None
    """Env workers: how many different tasks the slots may run at the same time; None: any number."""
    weights: tuple[WeightInfo, ...] = ()
    """Where rollout and actor are apart: what this process holds."""


@dataclass(frozen=True, kw_only=True)
class WorkerFailed:
    """The worker raised; it exits after this message."""

    error: str
    traceback: str
    exit_code: int = 1


@dataclass(frozen=True, kw_only=True)
class ResetRequest:
    """Begin an episode on a slot; its first observation goes to `target`."""

    slot: int
    start: EpisodeStart
    target: int
    video_stem: str | None = None
    """Record every env step to <stem>_<outcome>_<steps>steps.mp4."""
    keep_video: str = "all"
    """all | failures: which outcomes keep the recording."""


class Use(NamedTuple):
    """Fields of some records that a request is about."""

    tickets: Tickets
    fields: tuple[str, ...] | None = ()
    """None: all."""
    pool: int = 0
    """0: the arena; 1: the buckets of new weights."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a worker is asked to do; its reply carries the same number.

    Workers beside the driver share its records. To others the records travel (`cluster/ray_launcher.py`), so each
    kind of request says which fields its worker looks at and which ones it fills.
    """

    sequence: int = 0
    """Given by whoever sends it."""
    read_fields: ClassVar[Mapping[str, tuple[str, ...] | None]] = {}
    """What the worker must have before, by the attribute that holds the tickets; whether a record is valid and complete
    always goes along."""
    written_fields: ClassVar[Mapping[str, tuple[str, ...] | None]] = {}
    """What the worker has changed when it replies."""
    pool: ClassVar[int] = 0
    """See `Use`."""

    def reads(self) -> tuple[Use, ...]:
        """See `read_fields`."""
        return self._uses(self.read_fields)

    def writes(self) -> tuple[Use, ...]:
        """See `written_fields`."""
        return self._uses(self.written_fields)

    def _uses(self, fields: Mapping[str, tuple[str, ...] | None]) -> tuple[Use, ...]:
        return tuple(Use(np.atleast_1d(getattr(self, name)), names, self.pool) for name, names in fields.items())


@dataclass(frozen=True, kw_only=True)
class EnvRequest(Request):
    """Work for one stage of an env worker: steps, then resets."""

    stage: int
    slots: Sequence[int] = ()
    """[n] slots that run a chunk: the one in the record of `sources`; what they see after it goes to `targets`."""
    sources: Tickets = ()
    targets: Tickets = ()
    resets: tuple[ResetRequest, ...] = ()

    read_fields = {"sources": (Record.action, Record.reply, Record.cut_off), "observed": ()}
    # An expert acts in the simulator: its actions are a result.
    written_fields = {
        "sources": (Record.action, *STEP_RESULT, Record.components),
        "observed": (*OBSERVATION, STATE),
    }

    @property
    def observed(self) -> Tickets:
        """Where observations go, those of resets included."""
        return np.append(self.targets, [one.target for one in self.resets]).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A finished recording, or why there is none."""

    slot: int
    path: str | None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class EnvReport:
    """All requests of one stage are carried out; results are in the arena."""

    sequence: int
    stage: int
    sim_s: float
    render_s: float
    reset_s: float
    recordings: tuple[Recording, ...] = ()
    reward_errors: tuple[tuple[int, str], ...] = ()
    """Slots whose reward is not known, and why."""
    solved: tuple[int, ...] = ()
    """Slots that were reset to a state in which their goal holds."""


@dataclass(frozen=True, kw_only=True)
class InferRequest(Request):
    """Choose actions for a batch; they are written beside the observations."""

    tickets: Tickets
    """[n] records of the observations; arrays of the same length say more of each."""
    noise_seeds: Sequence[int] | IntArray
    chunks: Sequence[int] | IntArray
    """How many chunks of the episode came before."""
    greedy: bool
    version: int
    temperature: float | None = None
    """Sampling temperature; None: the one of training."""
    padded_size: int = 0
    """Fixed batch size; 0: as many rows as tickets."""
    rows: Sequence[int] | IntArray = ()
    """Their rows of the batch of fixed size."""

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
    """Train on a replay batch whose advantages lie in the records."""

    step: int
    tickets: Tickets
    episode: Sequence[int] | IntArray
    """Episode id of each ticket."""
    finals: tuple[tuple[int, int], ...] = ()
    """Off-policy: what was seen after the last chunk, by episode id; of those that terminated with hindsight only."""
    earlier: tuple[tuple[int, int], ...] = ()
    """Hindsight: episodes that go on from an earlier request, with the number that they had in its `open`."""
    open: tuple[tuple[int, int], ...] = ()
    """Hindsight: episodes that may go on in the next request, each with a number that no other episode has."""
    in_parts: bool = False
    """Reply after each micro-batch and wait for a ContinueRequest, so that inferences get their turn."""

    # All fields: which of them an update reads is the algorithm's affair.
    read_fields = {"tickets": None, "last": OBSERVATION}

    @property
    def last(self) -> Tickets:
        """What was seen after the last chunks."""
        return np.array([ticket for _, ticket in self.finals], np.int64)


@dataclass(frozen=True, kw_only=True)
class ImitateRequest(Request):
    """Train by supervision on records that hold an observation and the actions, or the replies, to learn from."""

    step: int
    tickets: Tickets
    augment: tuple[int, ...] = ()
    """Seeds of random changes of images, one for every `actor.micro_batch_size` samples; empty: no changes."""
    learn: bool = True
    """False: reply with the sums of loss and accuracy, and leave the weights as they are."""

    read_fields = {"tickets": (*OBSERVATION, Record.action, Record.reply, Record.success)}


@dataclass(frozen=True, kw_only=True)
class ContinueRequest(Request):
    """Carry out the next part of the last update."""


@dataclass(frozen=True, kw_only=True)
class SaveRequest(Request):
    """Write policy, optimizer and RNG state below `folder`."""

    folder: str


@dataclass(frozen=True, kw_only=True)
class LoadRequest(Request):
    """Load what a SaveRequest wrote."""

    folder: str


@dataclass(frozen=True, kw_only=True)
class PublishRequest(Request):
    """Write parts of the trained weights into a bucket."""

    ticket: int
    parts: tuple[WeightPart, ...]

    pool = 1
    read_fields = {"ticket": ()}
    written_fields = {"ticket": (BUCKET, STATE)}


@dataclass(frozen=True, kw_only=True)
class LoadWeightsRequest(Request):
    """Act with the parts in a bucket from now on."""

    ticket: int
    parts: tuple[WeightPart, ...]

    pool = 1
    read_fields = {"ticket": (BUCKET,)}


@dataclass(frozen=True, kw_only=True)
class Done:
    """Reply to a policy request."""

    sequence: int
    seconds: float
    metrics: dict[str, float]
    error: str = ""
    """What went wrong with a checkpoint; the worker itself is as it was."""
    finished: bool = True
    """False: a part of a request; the rest waits for a ContinueRequest."""


Reply = WorkerReady | WorkerFailed | EnvReport | Done
"""What a worker says."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Which rank a process is, and where the ranks of a run meet."""

    rank: int = 0
    world: int = 1
    host: str = ""
    """Of the rendezvous store; empty: nobody to meet."""
    port: int = 0
    secret: bytes = field(default=b"", repr=False)
    """What the gate to the store asks for (`channels/channel.py`); empty: the store itself is there, on this host."""
    timeout_s: float = 3600.0
    """Longest wait of a collective."""

    # Dealt in turns, not in blocks: with any number of rows the ranks get equally many, or one part more.
    def share(self, count: int, size: int) -> list[slice]:
        """This rank's slices of at most `size` out of `count` items; the slices themselves are those of one rank."""
        return [slice(start, start + size) for start in range(self.rank * size, count, self.world * size)]
