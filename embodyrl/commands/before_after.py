"""Selection and recording of videos of the same episodes before and after training."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np

from embodyrl.commands.eval_result import EvalResult
from embodyrl.commands.evaluate import ACTIONS_FILE, get_video_stem
from embodyrl.files import write_atomically
from embodyrl.monitor.history import EPISODES_FILE, EpisodeRow, read_episodes
from embodyrl.monitor.protocol import Monitor
from embodyrl.plan.episodes import eval_episodes
from embodyrl.plan.run_plan import RunPlan
from embodyrl.reports.paired import PairedComparison, compare_suites
from embodyrl.scheduler.rollout import Rollout
from embodyrl.scheduler.start import RolloutWorkers
from embodyrl.types import Episode, EpisodeSpec


def select_episodes_to_record(before: Sequence[EpisodeRow], after: Sequence[EpisodeRow], count: int) -> list[int]:
    """Select the episodes to record; return their episode numbers.

    Order per task: episodes that changed from failure to success, alternating with episodes that still fail; next,
    episodes that changed from success to failure; last, episodes that succeeded both times. Within each category,
    longer episodes come first. If success is unknown, the episode with the largest gain in return is first, followed by
    episodes in ascending order of their gain.
    """
    earlier = {row.episode: row for row in before}
    pairs = [(earlier[row.episode], row) for row in after if row.episode in earlier]
    by_task: dict[int, list[list[int]]] = {}
    known = any(row.success_once is not None for row in after)
    for first, last in sorted(
        pairs, key=lambda rows: -rows[1].steps if known else rows[0].episode_return - rows[1].episode_return
    ):
        outcome = (not last.success_once, bool(first.success_once)) if known else (False, False)
        index = [(False, False), (True, False), (True, True), (False, True)].index(outcome)
        by_task.setdefault(last.task_id, [[], [], [], []])[index].append(last.episode)
        if not known and len(by_task[last.task_id][0]) > 1:
            by_task[last.task_id][1] = [by_task[last.task_id][0].pop()] + by_task[last.task_id][1]
    orders = [
        [number for pair in zip_longest(*groups[:2]) for number in pair] + groups[2] + groups[3]
        for groups in by_task.values()
    ]
    order = [episode for episodes in zip_longest(*orders) for episode in episodes if episode is not None]
    return order[:count]


def record(
    run_plan: RunPlan,
    workers: RolloutWorkers,
    result: EvalResult,
    episode_ids: Sequence[int],
    videos: Path,
    monitor: Monitor,
) -> EvalResult:
    """Replay the stored actions of validation episodes to record videos; return the result with the video paths.

    A replayed episode may have another outcome, because simulators may be nondeterministic. Such an episode is reported
    and gets no video.
    """
    cfg = run_plan.cfg
    plan = eval_episodes(cfg, run_plan.env, run_plan.policy)
    with np.load(result.folder / ACTIONS_FILE) as stored:
        actions = {episode: stored[str(episode)] for episode in episode_ids if str(episode) in stored}

    def choose(spec: EpisodeSpec) -> tuple[str, str]:
        return str(videos / get_video_stem(run_plan.env, spec, result.step)), "all"

    done: list[Episode] = []

    def on_episode(episode: Episode) -> None:
        done.append(episode)
        monitor.progress(len(done), len(actions), f"recording videos of step {result.step}")

    missing = {e.episode_id for e in plan.episodes} - actions.keys()
    rollout = Rollout(plan.exclude(missing), keep=False, video=choose, replayed=actions, on_episode=on_episode)
    replay_result = workers.scheduler.collect(rollout)
    for problem in dict.fromkeys(replay_result.video_problems):
        monitor.text(f"recording failed: {problem}")
    rows = {row.episode: row for row in read_episodes(result.folder / EPISODES_FILE)}
    recorded: dict[int, str] = {}
    for episode in replay_result.episodes:
        number = episode.spec.episode_id
        if episode.video and bool(rows[number].success_once) == episode.success_once:
            recorded[number] = episode.video
        elif episode.video:
            Path(episode.video).unlink(missing_ok=True)
            outcome = "had another outcome when it was replayed"
            monitor.text(f"episode {number} of step {result.step} {outcome}; it has no video")
    updated_rows = (replace(row, video=recorded.get(row.episode, row.video)).to_json() for row in rows.values())
    write_atomically(result.folder / EPISODES_FILE, "".join(json.dumps(row) + "\n" for row in updated_rows))
    return replace(result, recordings=tuple(recorded.items()))


def record_changes(
    run_plan: RunPlan, workers: RolloutWorkers, first: EvalResult, last: EvalResult, videos: Path, monitor: Monitor
) -> tuple[EvalResult, EvalResult, tuple[PairedComparison, ...]]:
    """Compare the first and last validation, and record N episodes of both (`video=changed:N`).

    Returns:
        Both results with the recorded videos, and the paired test of each suite; the main suite is first.

    Raises:
        OSError: a recording cannot be written.
    """
    cfg = run_plan.cfg
    before, after = (read_episodes(result.folder / EPISODES_FILE) for result in (first, last))
    if cfg.video.startswith("changed:") and all((result.folder / ACTIONS_FILE).is_file() for result in (first, last)):
        episode_ids = select_episodes_to_record(before, after, int(cfg.video.removeprefix("changed:")))
        videos.mkdir(parents=True, exist_ok=True)
        first, last = (record(run_plan, workers, result, episode_ids, videos, monitor) for result in (first, last))
    return first, last, tuple(compare_suites(before, after))
