"""The same episodes before and after training: their scores side by side, and films of those that tell most."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np

from embodyrl.commands.eval_result import EvalResult, summarise
from embodyrl.commands.evaluate import ACTIONS_FILE, film_stem
from embodyrl.files import write_atomically
from embodyrl.monitor.history import EPISODES_FILE, EpisodeRow, read_episodes, read_table
from embodyrl.monitor.side_by_side import join_side_by_side
from embodyrl.plan.blueprint import Blueprint
from embodyrl.plan.episodes import eval_episodes
from embodyrl.plan.roots import EvalConfig
from embodyrl.scheduler.rollout import Rollout, RolloutResult, Tally
from embodyrl.scheduler.start import Workers
from embodyrl.types import EnvSpec, EpisodeSpec

Say = Callable[[str], None]


def read_evaluation(folder: Path, env: EnvSpec) -> EvalResult | None:
    """A validation that an earlier process of this run finished, from its files; None: there is none."""
    rows, saved = read_episodes(folder / EPISODES_FILE), read_table(folder)
    if not rows or not saved:
        return None
    spent = Tally(wall_s=saved["wall_s"], env_steps=saved["env_steps"])
    return summarise(rows, RolloutResult(dropped=saved["dropped"], tally=spent), env, folder)


def telling_episodes(before: Sequence[EpisodeRow], after: Sequence[EpisodeRow], count: int) -> list[int]:
    """Numbers of the episodes to look at: of every task one that went from failure to success, then of every task one
    that still fails, and so on; afterwards those that got worse and those that always worked.

    Of those that changed the longest come first, as there is more to see. Where success is not known, the largest and
    the smallest gain in return.
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


def film(
    blueprint: Blueprint, workers: Workers, result: EvalResult, wanted: Sequence[int], videos: Path, say: Say
) -> EvalResult:
    """Play episodes of a validation again, action by action, and record them; the result with its recordings.

    What does not come out as it did then is left out and said: a simulator need not repeat itself.
    """
    step = int(result.folder.name.removeprefix("step_"))
    cfg = blueprint.config(EvalConfig)
    plan = eval_episodes(cfg, blueprint.env, blueprint.policy)
    with np.load(result.folder / ACTIONS_FILE) as kept:
        actions = {episode: kept[str(episode)] for episode in wanted if str(episode) in kept}

    def choose(spec: EpisodeSpec) -> tuple[str, str]:
        return str(videos / film_stem(blueprint.env, spec, step)), "all"

    again = Rollout(
        plan.without({e.episode_id for e in plan.episodes} - actions.keys()), keep=False, video=choose, replayed=actions
    )
    played = workers.scheduler.collect(again)
    for problem in dict.fromkeys(played.video_problems):
        say(f"recording failed: {problem}")
    rows = {row.episode: row for row in read_episodes(result.folder / EPISODES_FILE)}
    films: dict[int, str] = {}
    for episode in played.episodes:
        number = episode.spec.episode_id
        if episode.video and bool(rows[number].success_once) == episode.success_once:
            films[number] = episode.video
        elif episode.video:
            Path(episode.video).unlink(missing_ok=True)
            say(f"episode {number} of step {step} came out otherwise when it was played again; it has no film")
    told = (replace(row, video=films.get(row.episode, row.video)).to_json() for row in rows.values())
    write_atomically(result.folder / EPISODES_FILE, "".join(json.dumps(row) + "\n" for row in told))
    return replace(result, recordings=tuple(films.items()))


def film_changes(
    blueprint: Blueprint, workers: Workers, ends: tuple[EvalResult, EvalResult], videos: Path, say: Say
) -> tuple[EvalResult, EvalResult]:
    """With `video=changed:N`: films of N telling episodes in the first and the last validation."""
    choice = blueprint.config(EvalConfig).video
    if not choice.startswith("changed:") or not all((end.folder / ACTIONS_FILE).is_file() for end in ends):
        return ends
    before, after = (read_episodes(end.folder / EPISODES_FILE) for end in ends)
    wanted = telling_episodes(before, after, int(choice.removeprefix("changed:")))
    videos.mkdir(parents=True, exist_ok=True)
    first, last = (film(blueprint, workers, end, wanted, videos, say) for end in ends)
    order = {episode: place for place, episode in enumerate(wanted)}
    return first, replace(last, recordings=tuple(sorted(last.recordings, key=lambda found: order[found[0]])))


def compare_recordings(
    first: EvalResult, last: EvalResult, folder: Path, *, steps: tuple[int, int], fps: int, warn: Say
) -> list[Path]:
    """Join the recordings of episodes that both validations kept; a failure to do so is only reported."""
    before = dict(first.recordings)
    joined: list[Path] = []
    for episode, path in last.recordings:
        if episode not in before:
            continue
        out = folder / f"before_after_ep{episode:03d}.mp4"
        labels = (f"before (step {steps[0]})", f"after (step {steps[1]})")
        try:
            join_side_by_side(Path(before[episode]), Path(path), out, labels=labels, fps=fps)
        except (OSError, RuntimeError, ValueError) as error:
            warn(f"could not join the recordings of episode {episode}: {error}")
            continue
        joined.append(out)
    return joined
