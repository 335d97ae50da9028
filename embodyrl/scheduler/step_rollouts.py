"""The rollouts of a training: opened ahead of time, and filled up where groups were filtered out."""

from collections.abc import Callable

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.plan.blueprint import Blueprint
from embodyrl.plan.episodes import EpisodeList, greedy_episodes, groups_per_step, refill_episodes, train_episodes
from embodyrl.plan.roots import TrainConfig
from embodyrl.scheduler.rollout import Rollout, RolloutResult
from embodyrl.scheduler.start import Workers
from embodyrl.types import Episode


class StepRollouts:
    """Keeps the rollouts of the next training steps open.

    The staleness rule (arXiv 2505.24298) in terms of fixed lists of episodes: those of training step `s` start once the
    weights have version `s - algorithm.max_staleness`; with 0, all data of an update come from its own weights. An
    episode that is running while weights change goes on with the new ones; each of its chunks keeps the version and the
    log-probabilities that it was drawn with.
    """

    def __init__(self, blueprint: Blueprint, workers: Workers, algorithm: Algorithm) -> None:
        self._blueprint = blueprint
        self._cfg = blueprint.config(TrainConfig)
        self._scheduler = workers.scheduler
        self._algorithm = algorithm
        self._rollouts: dict[int, Rollout] = {}
        self._lag = self._cfg.algorithm.max_staleness

    def collect(self, step: int, progress: Callable[[int, int], None]) -> RolloutResult:
        """Finish the rollout of a step with its weights; `progress` hears of (done, planned) episodes or chunks."""
        self._open(step, step + self._lag)
        rollout = self._rollouts.pop(step)
        total = _size(rollout.plan)

        def note(_: Episode) -> None:
            progress(min(len(rollout.out.episodes), total), total)

        rollout.on_episode = note
        collection = self._scheduler.finish(rollout)
        if self._algorithm.needs_greedy:
            # Without records: only their returns are compared with.
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
        """Let idle slots reset for the step after the last open one; the policy acts there once its weights are due."""
        self._open(step, min(step + self._lag, self._blueprint.total_steps - 1))

    def _open(self, first: int, last: int) -> None:
        algorithm, cfg = self._algorithm, self._cfg
        for step in range(first, min(last, self._blueprint.total_steps - 1) + 1):
            if step not in self._rollouts:
                counts = algorithm.counts_chunk_steps
                plan = train_episodes(cfg, self._blueprint.env, step, counts_chunk_steps=counts, seen=algorithm.seen)
                # A batched simulator moves the slots that wait as well.
                goes_on = cfg.env.train.continue_episodes and algorithm.counts_chunk_steps
                goes_on &= not self._blueprint.env.lockstep
                rollout = Rollout(plan, not_before=step - self._lag, continues=goes_on)
                self._rollouts[step] = self._scheduler.open(rollout)

    def _refill(self, step: int, attempt: int, missing: int, collection: RolloutResult, kept: list[Episode]) -> None:
        """Run further groups; the records of filtered episodes make room, their results stay in the metrics."""
        keep = {e.spec.episode_id for e in kept}
        filtered = [e for e in collection.episodes if e.spec.episode_id not in keep]
        self._scheduler.release(collection, filtered)
        collection.filtered += filtered
        collection.episodes = list(kept)
        plan = refill_episodes(self._cfg, self._blueprint.env, step, attempt, missing, seen=self._algorithm.seen)
        more = self._scheduler.collect(Rollout(plan))
        collection.episodes += more.episodes
        # Episode ids of refills lie behind those of the step, so neither overwrites the other.
        collection.tickets |= more.tickets
        collection.dropped += more.dropped
        collection.unjudged += more.unjudged
        collection.refills += missing
        collection.tally.add(more.tally)


def _size(plan: EpisodeList) -> int:
    return plan.num_slots * len(plan.waves) if plan.waves[0].quota_chunks else plan.num_episodes
