"""Metrics of one training step, by name."""

from collections.abc import Mapping, Sequence

import numpy as np

from embodyrl.cluster.timeline import CLOCK_METRICS
from embodyrl.monitor.intervals import Rate
from embodyrl.scheduler.rollout import RolloutResult
from embodyrl.types import EnvSpec, Episode

_CLOCK_DEPENDENT = CLOCK_METRICS.union(
    ("env/steps_per_s", "rollout/infer_batch_size", "actor/tokens_per_s", "actor/memory_gib")
)
"""Names of metrics that depend on the speed of the machine. In deterministic mode, `split_clock_metrics` renames the
metrics to `time/*`, because comparisons of runs ignore the metrics `time/*`."""


def rollout_metrics(collection: RolloutResult, env: EnvSpec, num_workers: int, restarts: int) -> dict[str, float]:
    """Return the metrics of a rollout: success, return and length of episodes, throughput, times and worker restarts.

    To avoid a bias towards short episodes, an episode is counted only if, at its start, its environment had enough
    steps left for an episode of maximum length. Without such episodes, all finished episodes are counted; if no episode
    finished, all episodes are counted. With `continue_episodes`, the whole episodes that end in this step are counted,
    possibly none.
    """
    stats = collection.stats
    # A rollout may overlap an earlier update; only the fraction for which this step waited is counted.
    waited_fraction = stats.wall_s / stats.span_s if stats.span_s else 1.0
    episodes = collection.episodes + collection.filtered
    finished = [episode for episode in episodes if episode.counted]
    if not collection.continues:
        finished = finished or [episode for episode in episodes if not episode.cut] or episodes
    metrics = {
        "train/episodes": float(len(finished)),
        "train/groups_refilled": float(collection.refills),
        "env/steps_per_s": stats.env_steps / stats.span_s if stats.span_s else 0.0,
        "env/steps": float(stats.env_steps),
        "env/restarts": float(restarts),
        "env/dropped_episodes": float(collection.dropped),
        "rollout/infer_batch_size": stats.num_observations / stats.num_inferences if stats.num_inferences else 0.0,
        "time/rollout": stats.wall_s,
        # Mean over env workers, to be comparable with wall time.
        "time/simulate": stats.sim_s * waited_fraction / num_workers,
        "time/render": stats.render_s * waited_fraction / num_workers,
        "time/reset": stats.reset_s * waited_fraction / num_workers,
        "time/infer": stats.inference_s * waited_fraction,
    }
    if finished:
        metrics |= _episode_metrics(finished, env)
    if collection.greedy:
        returns = [episode.episode_return / env.reward.factor for episode in collection.greedy.values()]
        metrics["train/greedy_return"] = float(np.mean(returns))
    if finished and env.reward.components:
        component_means = np.mean([episode.summary.components for episode in finished], axis=0)
        metrics |= {
            f"train/reward_{name}": float(mean)
            for name, mean in zip(env.reward.components, component_means, strict=True)
        }
    return metrics


def _episode_metrics(episodes: Sequence[Episode], env: EnvSpec) -> dict[str, float]:
    count, summaries = len(episodes), [episode.summary for episode in episodes]
    metrics = {
        "train/return": sum(episode.episode_return for episode in summaries) / env.reward.factor / count,
        "train/episode_len": sum(episode.length for episode in summaries) / count,
        "train/episode_len_min": float(min(episode.length for episode in summaries)),
        "train/episode_len_max": float(max(episode.length for episode in summaries)),
    }
    if env.limits_replies:
        metrics["train/cut_off"] = sum(episode.truncated for episode in episodes) / count
    if not env.reward.reports_success and not any(episode.success_once for episode in summaries):
        return metrics
    rate = Rate.of((episode.spec.reset_id, episode.success_once) for episode in summaries)
    metrics |= {
        "train/success_once": rate.value,
        "train/success_at_end": sum(episode.success_at_end for episode in episodes) / count,
        "train/effective_episodes": rate.effective_n or 0.0,
    }
    for task in sorted({episode.spec.task_id for episode in summaries}):
        task_successes = [episode.success_once for episode in summaries if episode.spec.task_id == task]
        metrics[f"train/task_{task}/success_once"] = sum(task_successes) / len(task_successes)
    return metrics


def split_clock_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Rename metrics that depend on wall-clock time (deterministic mode) to `time/<name>`."""
    return {f"time/{name}" if name in _CLOCK_DEPENDENT else name: value for name, value in metrics.items()}
