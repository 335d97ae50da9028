"""Training step in the driver: rollouts, and requests to the actor ranks."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.protocol import Scores
from embodyrl.channels.arena import Arena, records_of
from embodyrl.channels.layout import OBSERVATION, Record
from embodyrl.channels.messages import LoadRequest, SaveRequest, ScoreRequest, UpdateRequest
from embodyrl.errors import CheckpointError
from embodyrl.files import read_json
from embodyrl.plan.episodes import EpisodeList, greedy_episodes, groups_per_step, refill_episodes, train_episodes
from embodyrl.plan.run_plan import RunPlan
from embodyrl.scheduler.rollout import Rollout, RolloutResult
from embodyrl.scheduler.start import Workers
from embodyrl.types import ActionKind, Episode, IntArray, PreparedBatch


class StepRollouts:
    """Rollouts of the current training step and of later training steps.

    The staleness rule of arXiv 2505.24298 is applied to fixed lists of episodes: the episodes of training step `s`
    start once the weights have version `s - algorithm.max_staleness`; with 0, all data of an update come from its own
    weights. An episode that is running while weights change continues with the new weights; each of its chunks keeps
    the version and log-probabilities of the weights that sampled it.
    """

    def __init__(self, run_plan: RunPlan, workers: Workers, algorithm: Algorithm) -> None:
        self._run_plan = run_plan
        self._cfg = run_plan.cfg
        self._scheduler = workers.scheduler
        self._algorithm = algorithm
        self._rollouts: dict[int, Rollout] = {}
        self._lag = self._cfg.algorithm.max_staleness

    def collect(self, step: int, progress: Callable[[int, int], None]) -> RolloutResult:
        """Finish the rollout of a step. Call `progress(finished, total)` after each episode."""
        self._open(step, step + self._lag)
        rollout = self._rollouts.pop(step)
        total = _size(rollout.plan)

        def note(_: Episode) -> None:
            progress(min(len(rollout.out.episodes), total), total)

        rollout.on_episode = note
        collection = self._scheduler.finish(rollout)
        if self._algorithm.estimator.needs_greedy:
            # Without records: only the returns are compared.
            found = self._scheduler.collect(Rollout(greedy_episodes(self._cfg, rollout.plan), greedy=True, keep=False))
            collection.greedy = {e.spec.group_id: e for e in found.episodes}
            collection.tally.add(found.tally)
        for attempt in range(self._algorithm.filter_refills):
            kept = [collection.episodes[i] for i in self._algorithm.select(collection.episodes)]
            missing = groups_per_step(self._cfg) - len({e.spec.group_id for e in kept})
            if missing <= 0:
                break
            self._refill(step, attempt, missing, collection, kept)
        return collection

    def ahead(self, step: int) -> None:
        """Queue the next rollouts: idle slots reset immediately, and inference waits for the new weights."""
        self._open(step, min(step + self._lag, self._run_plan.total_steps - 1))

    def _open(self, first: int, last: int) -> None:
        algorithm, cfg = self._algorithm, self._cfg
        for step in range(first, min(last, self._run_plan.total_steps - 1) + 1):
            if step not in self._rollouts:
                counts = algorithm.estimator.counts_chunk_steps
                plan = train_episodes(cfg, self._run_plan.env, step, counts_chunk_steps=counts, seen=algorithm.seen)
                # A batched simulator steps the waiting slots, too.
                goes_on = cfg.env.train.continue_episodes and algorithm.estimator.counts_chunk_steps
                goes_on &= not self._run_plan.env.simulator.lockstep
                rollout = Rollout(plan, not_before=step - self._lag, continues=goes_on)
                self._rollouts[step] = self._scheduler.open(rollout)

    def _refill(self, step: int, attempt: int, missing: int, collection: RolloutResult, kept: list[Episode]) -> None:
        """Run `missing` new groups to replace filtered groups; free the records of filtered episodes."""
        keep = {e.spec.episode_id for e in kept}
        filtered = [e for e in collection.episodes if e.spec.episode_id not in keep]
        self._scheduler.release(collection, filtered)
        collection.filtered += filtered
        collection.episodes = list(kept)
        plan = refill_episodes(self._cfg, self._run_plan.env, step, attempt, missing, seen=self._algorithm.seen)
        more = self._scheduler.collect(Rollout(plan))
        collection.episodes += more.episodes
        # Episode ids of refills follow those of the step, so no id is used twice.
        collection.tickets |= more.tickets
        collection.dropped += more.dropped
        collection.reward_errors += more.reward_errors
        collection.refills += missing
        collection.tally.add(more.tally)


def _size(plan: EpisodeList) -> int:
    return plan.num_slots * len(plan.waves) if plan.waves[0].quota_chunks else plan.num_episodes


ALGORITHM_FILE = "algorithm.json"


class Actors:
    """Client of the actor ranks: computes log-probabilities, trains, saves and loads. Batches are passed as tickets."""

    def __init__(self, workers: Workers, algorithm: Algorithm, run_plan: RunPlan) -> None:
        self._loop = workers.scheduler
        self._arena = workers.arena
        self._algorithm = algorithm
        self._part_weights = run_plan.env.reward.weights
        self._writes = run_plan.env.action.kind is ActionKind.text
        # A process that acts and trains runs inference between the micro-batches of an update.
        self._in_parts = algorithm.settings.max_staleness > 0 and not run_plan.is_disaggregated

    def score(self, collection: RolloutResult) -> Scores:
        """Compute the reference log-probabilities that the algorithm needs, and gather its inputs from the records."""
        if self._algorithm.needs_reference and collection.episodes:
            # Exclude the last ticket: its record has an observation without an action.
            held = [collection.tickets[e.spec.episode_id][: len(e.records)] for e in collection.episodes]
            self._loop.call(ScoreRequest(tickets=np.concatenate(held)))
        return gather_scores(self._algorithm, self._arena, collection, self._part_weights)

    def update(self, step: int, collection: RolloutResult, batch: PreparedBatch) -> dict[str, float]:
        """Write advantages into the records and train; skip the update if the gradient is exactly zero."""
        if not batch.has_signal:
            return {"loss": 0.0, "grad_norm": 0.0, "optimizer_steps": 0.0, "seconds": 0.0}
        self._arena[Record.advantage][batch.records] = batch.advantage
        self._arena[Record.returns][batch.records] = batch.returns
        # A batch contains record numbers; a request contains tickets, which detect reused records.
        by_record = np.zeros(self._arena.capacity, np.int64)
        held = np.concatenate(list(collection.tickets.values()))
        by_record[records_of(held)] = held
        finals = (
            [e for e in collection.episodes if e.final_record >= 0] if self._algorithm.estimator.needs_replay else []
        )
        pieces = collection.episodes if self._algorithm.settings.needs_all_ends and collection.continues else []
        request = UpdateRequest(
            step=step,
            tickets=by_record[batch.records],
            episode=batch.episode,
            finals=tuple((e.spec.episode_id, int(by_record[e.final_record])) for e in finals),
            earlier=tuple((e.spec.episode_id, e.earlier.spec.noise_seed) for e in pieces if e.earlier),
            open=tuple((e.spec.episode_id, e.whole.spec.noise_seed) for e in pieces if e.cut),
            in_parts=self._in_parts,
        )
        tokens = self._tokens(batch) if self._writes else {}
        done = self._loop.call(request)
        if tokens:
            tokens["tokens_per_s"] = tokens.pop("tokens") / done.seconds
        return done.metrics | tokens | {"seconds": done.seconds}

    def _tokens(self, batch: PreparedBatch) -> dict[str, float]:
        """Return the number of tokens of a batch, and the mean and maximum length of its prompts.

        Prompts include the tokens of the chat template.
        """
        cost, replies = self._arena[Record.cost][batch.records], self._arena[Record.valid][batch.records].sum(1)
        prompts = cost - replies
        return {
            "tokens": float(cost.sum()),
            "prompt_len": float(prompts.mean()),
            "prompt_len_max": float(prompts.max()),
        }

    def save(self, folder: Path) -> None:
        """Write the policy, the training state and the algorithm's state to `folder`."""
        self._loop.call(SaveRequest(folder=str(folder)))
        (folder / ALGORITHM_FILE).write_text(json.dumps(self._algorithm.state()) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Load the files written by `save`.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        self._loop.call(LoadRequest(folder=str(folder)))
        path = folder / ALGORITHM_FILE
        try:
            self._algorithm.load_state(read_json(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}: {error}); use another checkpoint."
            ) from error


def gather_scores(
    algorithm: Algorithm, arena: Arena, collection: RolloutResult, part_weights: tuple[float, ...]
) -> Scores:
    """Gather the inputs of the advantage estimator from the records of a rollout."""
    rows = [episode.records for episode in collection.episodes]
    wants = rows if algorithm.needs_reference_in_prepare else []
    return Scores(
        logprob=tuple(arena[Record.logprob][records] for records in wants),
        ref_logprob=tuple(arena[Record.ref_logprob][records] for records in wants),
        states=tuple(_hashes(arena, records) for records in rows) if algorithm.estimator.needs_states else (),
        greedy=tuple(collection.greedy.get(e.spec.group_id) for e in collection.episodes),
        part_weights=part_weights,
    )


def _hashes(arena: Arena, records: IntArray) -> IntArray:
    """Return a 64-bit hash of the observation of each record, to find equal states."""
    fields = [arena[name] for name in OBSERVATION]
    digests = [hashlib.blake2b(b"".join(f[r].tobytes() for f in fields), digest_size=8).digest() for r in records]
    return np.frombuffer(b"".join(digests), dtype=np.int64)
