"""Episode lists for the collection of demonstrations."""

from collections.abc import Sequence

import numpy as np

from embodyrl.plan.episodes import EpisodeList, make_single_wave
from embodyrl.plan.initial_states import get_reset_ids
from embodyrl.plan.schema import Config
from embodyrl.plan.seeds import derive, derive_small
from embodyrl.types import EnvSpec, EpisodeSpec


def list_demonstration_episodes(cfg: Config, env: EnvSpec, trials: Sequence[tuple[int, int]]) -> EpisodeList:
    """Return the episodes of trials, each of which is a pair of task id and trial number.

    The trials of a task use the initial states of `env.train` in seeded permutations, each state equally often.
    """
    split = cfg.env.train
    episodes = []
    for index, (task, trial) in enumerate(trials):
        ids = list(get_reset_ids(env, split, task))
        epoch, position = divmod(trial, len(ids))
        order = np.random.default_rng(derive(cfg.seed, "demonstration-ids", task, epoch)).permutation(len(ids))
        episodes.append(
            EpisodeSpec(
                episode_id=index,
                reset_id=ids[int(order[position])],
                task_id=task,
                group_id=index,
                member=0,
                seed=derive_small(cfg.seed, "demonstration", task, trial),
                noise_seed=derive(cfg.seed, "demonstration-noise", task, trial),
            )
        )
    return make_single_wave(cfg, split, episodes)
