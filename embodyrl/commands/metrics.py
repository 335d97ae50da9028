"""Metrics of one training step, by name."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from embodyrl.monitor.intervals import Rate
from embodyrl.scheduler.rollout import RolloutResult
from embodyrl.types import EnvSpec, Episode

_CLOCK_DEPENDENT = frozenset(("env/steps_per_s", "rollout/infer_batch_size", "actor/tokens_per_s", "actor/memory_gib"))
"""Names of metrics that depend on the speed of the machine. In deterministic mode, `split_clock_metrics` renames the
metrics to `time/*`, because comparisons of runs ignore the metrics `time/*`."""


def rollout_metrics(collection: RolloutResult, env: EnvSpec, num_workers: int, restarts: int) -> dict[str, float]:
    """Return the metrics of a rollout: success, return and length of episodes, throughput, times and worker restarts.

    To avoid a bias towards short episodes, only episodes that started with enough quota for the longest episode are
    counted. Without such episodes, all finished episodes are counted; if no episode finished, all episodes are counted.
    With `continue_episodes`, the whole episodes that end in this step are counted, possibly none.
    """
    tally = collection.tally
    # Work during an earlier update counts only for the time that this step waited for it.
    share = tally.wall_s / tally.span_s if tally.span_s else 1.0
    every = collection.episodes + collection.filtered
    finished = [e for e in every if e.counted]
    if not collection.continues:
        finished = finished or [e for e in every if not e.cut] or every
    metrics = {
        "train/episodes": float(len(finished)),
        "train/groups_refilled": float(collection.refills),
        "env/steps_per_s": tally.env_steps / tally.span_s if tally.span_s else 0.0,
        "env/steps": float(tally.env_steps),
        "env/restarts": float(restarts),
        "env/dropped_episodes": float(collection.dropped),
        "rollout/infer_batch_size": tally.inferred / tally.inferences if tally.inferences else 0.0,
        "time/rollout": tally.wall_s,
        # Mean over env workers, to be comparable with wall time.
        "time/simulate": tally.sim_s * share / num_workers,
        "time/render": tally.render_s * share / num_workers,
        "time/reset": tally.reset_s * share / num_workers,
        "time/infer": tally.infer_s * share,
    }
    if finished:
        metrics |= _episode_metrics(finished, env)
    if collection.greedy:
        returns = [e.episode_return / env.reward.factor for e in collection.greedy.values()]
        metrics["train/greedy_return"] = float(np.mean(returns))
    if finished and env.reward.components:
        parts = np.mean([e.whole.components for e in finished], axis=0)
        metrics |= {
            f"train/reward_{name}": float(part) for name, part in zip(env.reward.components, parts, strict=True)
        }
    return metrics


def _episode_metrics(episodes: Sequence[Episode], env: EnvSpec) -> dict[str, float]:
    count, wholes = len(episodes), [e.whole for e in episodes]
    metrics = {
        "train/return": sum(e.episode_return for e in wholes) / env.reward.factor / count,
        "train/episode_len": sum(e.length for e in wholes) / count,
        "train/episode_len_min": float(min(e.length for e in wholes)),
        "train/episode_len_max": float(max(e.length for e in wholes)),
    }
    if env.limits_replies:
        metrics["train/cut_off"] = sum(e.truncated for e in episodes) / count
    if not env.reward.reports_success and not any(e.success_once for e in wholes):
        return metrics
    rate = Rate.of((e.spec.reset_id, e.success_once) for e in wholes)
    metrics |= {
        "train/success_once": rate.value,
        "train/success_at_end": sum(e.success_at_end for e in episodes) / count,
        "train/effective_episodes": rate.effective or 0.0,
    }
    for task in sorted({e.spec.task_id for e in wholes}):
        own = [e.success_once for e in wholes if e.spec.task_id == task]
        metrics[f"train/task_{task}/success_once"] = sum(own) / len(own)
    return metrics


def split_clock_metrics(metrics: Mapping[str, float], further: Iterable[str] = ()) -> dict[str, float]:
    """Rename clock-dependent metrics, including the names in `further`, to `time/<name>`, for deterministic mode."""
    names = _CLOCK_DEPENDENT.union(further)
    return {f"time/{name}" if name in names else name: value for name, value in metrics.items()}
