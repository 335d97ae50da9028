"""Lists of the episodes of training steps and evaluations, which are planned in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from embodyrl.algorithms.shaping import TaskOutcomes
from embodyrl.envs.settings import EnvSplit
from embodyrl.plan.initial_states import get_reset_ids, reset_id_array, select_tasks
from embodyrl.plan.schema import Config
from embodyrl.plan.seeds import derive, derive_small
from embodyrl.plan.task_weights import has_weights, sample_weighted_ids
from embodyrl.types import EnvSpec, EpisodeSpec, IntArray, PolicySpec

_EVAL_SEED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeBatch:
    """A set of episodes (a wave) that may run concurrently; waves run one after another."""

    queues: tuple[Sequence[EpisodeSpec], ...]
    """One queue per environment, or a single queue shared by all environments."""
    quota_chunks: int | None = None
    """Number of chunk steps that each environment executes, after which its running episode is cut; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeList:
    """The episodes of one rollout."""

    num_envs: int
    """Number of environments for the episodes, in all env workers."""
    max_episode_steps: int
    """Maximum number of env steps; longer episodes are truncated."""
    max_chunks: int
    """Maximum number of chunks; longer episodes are truncated."""
    ignore_terminations: bool
    """True if episodes continue after a success until the time limit."""
    waves: tuple[EpisodeBatch, ...]
    """Waves in the order of execution."""

    @property
    def episodes(self) -> Iterator[EpisodeSpec]:
        """All episodes, in the order of waves and queues."""
        return (episode for wave in self.waves for queue in wave.queues for episode in queue)

    @property
    def num_episodes(self) -> int:
        """Number of episodes in all waves."""
        return sum(len(queue) for wave in self.waves for queue in wave.queues)

    @property
    def expected(self) -> int:
        """Number of episodes that will run; a lower bound if environments have quotas."""
        return self.num_envs * len(self.waves) if self.waves[0].quota_chunks else self.num_episodes

    def exclude(self, episodes: Set[int]) -> EpisodeList:
        """Return a copy of the list without the episodes whose ids are in `episodes`."""
        waves = (
            replace(wave, queues=tuple(tuple(e for e in q if e.episode_id not in episodes) for q in wave.queues))
            for wave in self.waves
        )
        return replace(self, waves=tuple(waves)) if episodes else self


def groups_per_step(cfg: Config) -> int:
    """Return the number of groups per training step."""
    return cfg.env.train.total_num_envs * cfg.algorithm.rollout_epoch // cfg.algorithm.group_size


def train_episodes(
    cfg: Config, env: EnvSpec, step: int, *, counts_chunk_steps: bool, outcomes: TaskOutcomes | None = None
) -> EpisodeList:
    """Return the episodes of a training step.

    The result depends only on config, step and, with a curriculum, the earlier `outcomes`, so a resumed run has the
    same episodes.
    """
    split, algorithm = cfg.env.train, cfg.algorithm
    num_envs, size = split.total_num_envs, algorithm.group_size
    reset_ids = np.repeat(_select_reset_ids(cfg, env, step, outcomes), size)
    if counts_chunk_steps:
        epochs = reset_ids.reshape(algorithm.rollout_epoch, num_envs)
        waves = [_build_quota_wave(cfg, env, step, epoch, ids) for epoch, ids in enumerate(epochs)]
    else:
        index = np.arange(len(reset_ids))
        episodes = tuple(_build_train_specs(cfg, env, step, index, index // size, reset_ids))
        length = len(episodes) if split.auto_reset else num_envs
        waves = [EpisodeBatch(queues=(episodes[start : start + length],)) for start in range(0, len(episodes), length)]
    return _episode_list(cfg, split, waves, num_envs)


def refill_episodes(
    cfg: Config, env: EnvSpec, step: int, attempt: int, groups: int, *, outcomes: TaskOutcomes | None = None
) -> EpisodeList:
    """Return the episodes of `groups` additional groups, which replace filtered groups of a training step."""
    size, first = cfg.algorithm.group_size, (attempt + 1) * groups_per_step(cfg)
    # Refills use new episode ids, after all ids that the step may have planned, because ids determine the noise.
    index = np.arange(first * size, (first + groups) * size)
    if has_weights(cfg):
        seed = derive(cfg.seed, "curriculum-refill", step, attempt)
        reset_ids = np.repeat(sample_weighted_ids(cfg, env, groups, outcomes, seed), size)
    else:
        ids = reset_id_array(env, cfg.env.train)
        reset_ids = ids[derive(cfg.seed, "refill", step, index // size) % len(ids)]
    return make_single_wave(cfg, cfg.env.train, _build_train_specs(cfg, env, step, index, index // size, reset_ids))


def greedy_episodes(cfg: Config, plan: EpisodeList) -> EpisodeList:
    """Return one greedy episode for each group of a training step, from the group's initial state."""
    first = {episode.group_id: episode for episode in plan.episodes}
    return make_single_wave(cfg, cfg.env.train, [first[group] for group in sorted(first)])


def repeats_exactly(cfg: Config, env: EnvSpec, policy: PolicySpec, task: int) -> bool:
    """Return True if two evaluation episodes from the same reset id of this task are always identical."""
    noisy = policy.is_stochastic and (policy.scripted or cfg.eval.sampling_params.do_sample)
    return not noisy and task not in env.seeded_tasks


def count_requested_episodes(cfg: Config, env: EnvSpec) -> int:
    """Return the number of episodes requested for an evaluation."""
    num_episodes = cfg.eval.episodes or cfg.eval.episodes_per_task * len(select_tasks(env, cfg.env.eval, across=True))
    return num_episodes * cfg.eval.samples


def eval_start(env: EnvSpec, split: EnvSplit, episode: int) -> tuple[int, int, int]:
    """Return task id, reset id and seed of an evaluation episode.

    Consecutive episodes cycle through the tasks, then through the initial states of each task.
    """
    tasks = select_tasks(env, split, across=True)
    trial, place = divmod(episode, len(tasks))
    ids = get_reset_ids(env, split, tasks[place])
    return tasks[place], ids[trial % len(ids)], _EVAL_SEED + trial


def eval_episodes(cfg: Config, env: EnvSpec, policy: PolicySpec) -> EpisodeList:
    """Return the episodes of an evaluation; their initial states and simulator seeds do not depend on the run's seed.

    Episodes that would exactly repeat another episode are skipped.
    """
    split = cfg.env.eval
    tasks = select_tasks(env, split, across=True)
    episodes = []
    num_requested = count_requested_episodes(cfg, env)
    for episode in range(num_requested):
        sample, place = divmod(episode, num_requested // cfg.eval.samples)
        task, reset_id, seed = eval_start(env, split, place)
        # A repetition would count one episode twice, and make the confidence interval too narrow.
        repeated = place // len(tasks) >= len(get_reset_ids(env, split, task))
        if (sample or repeated) and repeats_exactly(cfg, env, policy, task):
            continue
        episodes.append(
            EpisodeSpec(
                episode_id=episode,
                reset_id=reset_id,
                task_id=task,
                group_id=episode,
                member=0,
                seed=seed,
                noise_seed=derive(cfg.seed, "eval-noise", episode),
            )
        )
    # Episodes of one task run together, so that a worker loads few simulators.
    episodes.sort(key=lambda e: (tasks.index(e.task_id), e.episode_id))
    return make_single_wave(cfg, split, episodes)


def make_single_wave(cfg: Config, split: EnvSplit, episodes: Sequence[EpisodeSpec]) -> EpisodeList:
    """Return an episode list with a single wave: the episodes start in order, in any free environment."""
    return _episode_list(
        cfg, split, [EpisodeBatch(queues=(tuple(episodes),))], min(split.total_num_envs, len(episodes))
    )


def _episode_list(cfg: Config, split: EnvSplit, waves: list[EpisodeBatch], num_envs: int) -> EpisodeList:
    return EpisodeList(
        num_envs=num_envs,
        max_episode_steps=split.max_episode_steps,
        max_chunks=-(-split.max_episode_steps // cfg.chunk_steps),
        ignore_terminations=split.ignore_terminations,
        waves=tuple(_split_queue(wave, num_envs) for wave in waves) if cfg.runner.deterministic else tuple(waves),
    )


def _select_reset_ids(cfg: Config, env: EnvSpec, step: int, outcomes: TaskOutcomes | None) -> list[int]:
    """Return the reset ids of the step's groups from seeded permutations, so that every id occurs equally often."""
    count = groups_per_step(cfg)
    if has_weights(cfg):
        return sample_weighted_ids(cfg, env, count, outcomes, derive(cfg.seed, "curriculum", step))
    ids = reset_id_array(env, cfg.env.train)
    stream: list[int] = []
    # Computed from the step and not stored: a resumed run continues at the same position.
    position = step * count
    while len(stream) < count:
        epoch, offset = divmod(position + len(stream), len(ids))
        shuffle = cfg.data.shuffle if cfg.reads_rows else True
        order = _permutation(cfg.seed, epoch, len(ids)) if shuffle else np.arange(len(ids))
        stream += ids[order[offset : offset + count - len(stream)]].tolist()
    return stream


@lru_cache(maxsize=1)
def _permutation(seed: int, epoch: int, count: int) -> IntArray:
    """Return the order of the reset ids in pass `epoch` over all ids. Cached, because shuffling many ids is slow."""
    return np.random.default_rng(derive(seed, "reset-ids", epoch)).permutation(count)


def _build_quota_wave(cfg: Config, env: EnvSpec, step: int, epoch: int, reset_ids: IntArray) -> EpisodeBatch:
    """Return a wave with one queue per environment, long enough for the quota if episodes end after one chunk."""
    split, size = cfg.env.train, cfg.algorithm.group_size
    steps = split.max_steps_per_rollout_epoch or split.max_episode_steps
    quota = -(-steps // cfg.chunk_steps)
    per_env = quota if split.auto_reset else 1
    fixed_ids = split.use_fixed_reset_state_ids and not split.continue_episodes
    choices = None if fixed_ids else reset_id_array(env, split)
    members = epoch * len(reset_ids) + np.arange(len(reset_ids))

    @cache
    def specs(index: int) -> Sequence[EpisodeSpec]:
        """Return episode number `index` of each queue, planned together because array operations are faster."""
        ids = reset_ids
        if choices is not None:
            ids = choices[derive(cfg.seed, "free-reset", step, members, np.full_like(members, index)) % len(choices)]
        return _build_train_specs(cfg, env, step, members * per_env + index, members // size, ids)

    def queue(env_index: int) -> Sequence[EpisodeSpec]:
        return _LazyEpisodes(lambda index: specs(index)[env_index], per_env)

    return EpisodeBatch(queues=tuple(map(queue, range(len(reset_ids)))), quota_chunks=quota)


@dataclass(frozen=True, slots=True)
class _LazyEpisodes(Sequence[EpisodeSpec]):
    """Episodes that are created on access, because most episodes of a quota never start."""

    create: Callable[[int], EpisodeSpec]
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> EpisodeSpec:
        return self.create(range(self.length)[index])


def _build_train_specs(
    cfg: Config, env: EnvSpec, step: int, index: IntArray, group: IntArray, reset_id: npt.ArrayLike
) -> Sequence[EpisodeSpec]:
    seeds, noise = derive_small(cfg.seed, "env", step, group), derive(cfg.seed, "noise", step, index)
    columns = [np.asarray(column).tolist() for column in (index, reset_id, group, seeds, noise)]

    def create(position: int) -> EpisodeSpec:
        episode_id, reset_id_value, group_id, seed, noise_seed = (column[position] for column in columns)
        return EpisodeSpec(
            episode_id=episode_id,
            reset_id=reset_id_value,
            task_id=env.task_of(reset_id_value)[0],
            group_id=group_id,
            member=episode_id % cfg.algorithm.group_size,
            seed=seed,
            noise_seed=noise_seed,
        )

    return _LazyEpisodes(create, len(index))


def _split_queue(wave: EpisodeBatch, num_envs: int) -> EpisodeBatch:
    """Distribute a shared queue over the environments, so that the order of completion does not matter."""
    if len(wave.queues) != 1 or num_envs == 1:
        return wave
    (queue,) = wave.queues
    return EpisodeBatch(
        queues=tuple(queue[env_index::num_envs] for env_index in range(num_envs)), quota_chunks=wave.quota_chunks
    )
