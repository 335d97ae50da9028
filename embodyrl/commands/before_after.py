"""Selection, recording and joining of videos of the same episodes before and after training."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np

from embodyrl.commands.eval_result import EvalResult
from embodyrl.commands.evaluate import ACTIONS_FILE, Compared, Say, video_stem_of
from embodyrl.files import write_atomically
from embodyrl.monitor.history import EPISODES_FILE, EpisodeRow, read_episodes
from embodyrl.plan.episodes import eval_episodes
from embodyrl.plan.run_plan import RunPlan
from embodyrl.reports.paired import pair_suites
from embodyrl.reports.side_by_side import join_side_by_side
from embodyrl.scheduler.rollout import Rollout
from embodyrl.scheduler.start import Workers
from embodyrl.types import EpisodeSpec


def select_episodes_to_record(before: Sequence[EpisodeRow], after: Sequence[EpisodeRow], count: int) -> list[int]:
    """Select the episodes to record; return their episode numbers.

    For each task, episodes that changed from failure to success alternate with episodes that still fail. Then follow
    episodes that got worse, and episodes that succeeded twice. Longer episodes are first. If success is unknown,
    the episode with the largest gain in return is first, followed by episodes in ascending order of their gain.
    """
    earlier = {row.episode: row for row in before}
    pairs = [(earlier[row.episode], row) for row in after if row.episode in earlier]
    by_task: dict[int, list[list[int]]] = {}
    known = any(row.success_once is not None for row in after)
    for a, b in sorted(pairs, key=lambda p: -p[1].steps if known else p[0].episode_return - p[1].episode_return):
        kind = (not b.success_once, bool(a.success_once)) if known else (False, False)
        place = [(False, False), (True, False), (True, True), (False, True)].index(kind)
        by_task.setdefault(b.task_id, [[], [], [], []])[place].append(b.episode)
        if not known and len(by_task[b.task_id][0]) > 1:
            by_task[b.task_id][1] = [by_task[b.task_id][0].pop()] + by_task[b.task_id][1]
    turns = [
        [e for pair in zip_longest(*groups[:2]) for e in pair] + groups[2] + groups[3] for groups in by_task.values()
    ]
    order = [episode for turn in zip_longest(*turns) for episode in turn if episode is not None]
    return order[:count]


def record(
    run_plan: RunPlan, workers: Workers, result: EvalResult, wanted: Sequence[int], videos: Path, say: Say
) -> EvalResult:
    """Repeat the recorded actions of validation episodes to record videos; return the result with the recordings.

    Episodes with a different outcome are skipped and reported, because simulators may be nondeterministic.
    """
    cfg = run_plan.cfg
    plan = eval_episodes(cfg, run_plan.env, run_plan.policy)
    with np.load(result.folder / ACTIONS_FILE) as kept:
        actions = {episode: kept[str(episode)] for episode in wanted if str(episode) in kept}

    def choose(spec: EpisodeSpec) -> tuple[str, str]:
        return str(videos / video_stem_of(run_plan.env, spec, result.step)), "all"

    again = Rollout(
        plan.without({e.episode_id for e in plan.episodes} - actions.keys()), keep=False, video=choose, replayed=actions
    )
    played = workers.scheduler.collect(again)
    for problem in dict.fromkeys(played.video_problems):
        say(f"recording failed: {problem}")
    rows = {row.episode: row for row in read_episodes(result.folder / EPISODES_FILE)}
    recorded: dict[int, str] = {}
    for episode in played.episodes:
        number = episode.spec.episode_id
        if episode.video and bool(rows[number].success_once) == episode.success_once:
            recorded[number] = episode.video
        elif episode.video:
            Path(episode.video).unlink(missing_ok=True)
            outcome = "had another outcome when its actions were repeated"
            say(f"episode {number} of step {result.step} {outcome}; it has no video")
    found = (replace(row, video=recorded.get(row.episode, row.video)).to_json() for row in rows.values())
    write_atomically(result.folder / EPISODES_FILE, "".join(json.dumps(row) + "\n" for row in found))
    return replace(result, recordings=tuple(recorded.items()))


def record_changes(
    run_plan: RunPlan, workers: Workers, first: EvalResult, last: EvalResult, videos: Path, say: Say
) -> Compared:
    """Record N episodes of the first and last validation (`video=changed:N`), and join each episode's two recordings.

    Raises:
        OSError: a recording cannot be written.
    """
    cfg = run_plan.cfg
    if cfg.video.startswith("changed:") and all((end.folder / ACTIONS_FILE).is_file() for end in (first, last)):
        before, after = (read_episodes(end.folder / EPISODES_FILE) for end in (first, last))
        wanted = select_episodes_to_record(before, after, int(cfg.video.removeprefix("changed:")))
        videos.mkdir(parents=True, exist_ok=True)
        first, last = (record(run_plan, workers, end, wanted, videos, say) for end in (first, last))
        order = {episode: place for place, episode in enumerate(wanted)}
        last = replace(last, recordings=tuple(sorted(last.recordings, key=lambda found: order[found[0]])))
    joined = _join_recordings(first, last, videos, fps=cfg.video_cfg.fps, say=say)
    episodes = (read_episodes(end.folder / EPISODES_FILE) for end in (first, last))
    lines = tuple(one.line(("before", "after")) for one in pair_suites(*episodes))
    return Compared(first=first, last=last, videos=tuple(joined), lines=lines)


def _join_recordings(first: EvalResult, last: EvalResult, folder: Path, *, fps: int, say: Say) -> list[Path]:
    """Join the two recordings of each episode that both validations recorded; report failures."""
    before = dict(first.recordings)
    joined: list[Path] = []
    for episode, path in last.recordings:
        if episode not in before:
            continue
        out = folder / f"before_after_ep{episode:03d}.mp4"
        labels = (f"before (step {first.step})", f"after (step {last.step})")
        try:
            join_side_by_side(Path(before[episode]), Path(path), out, labels=labels, fps=fps)
        except (OSError, RuntimeError, ValueError) as error:
            say(f"could not join the recordings of episode {episode}: {error}")
            continue
        joined.append(out)
    return joined
