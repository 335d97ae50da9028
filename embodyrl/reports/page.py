"""Generation of an HTML report: reads runs, plots curves, and renders the template."""

import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from embodyrl.config.settings import format_value
from embodyrl.files import natural_sort_key, write_atomically
from embodyrl.monitor.history import EVENTS_FILE
from embodyrl.monitor.intervals import Rate
from embodyrl.monitor.phases import build_time_tree, format_duration, run_seconds, step_seconds, sum_times
from embodyrl.plan.keys import all_keys, state_keys
from embodyrl.plan.saved import changed_settings
from embodyrl.reports.charts import (
    Line,
    build_curve,
    find_differing_settings,
    fits_log_axis,
    format_number,
    plot_lines,
)
from embodyrl.reports.history import SUCCESS_KEYS, History, describe_differences, read_history, select_samples
from embodyrl.reports.media import EMBED_BYTES, VideoIndex, build_cards, pair_cards
from embodyrl.reports.paired import compare_suites
from embodyrl.reports.seeds import SeedGroup, compare_groups, group_by_seed
from embodyrl.version import __version__

_CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("success", ("eval/success_once", "train/success_once")),
    ("return", ("eval/return", "train/return")),
    ("episode length", ("eval/episode_len", "train/episode_len", "train/episode_len_min", "train/episode_len_max")),
    ("fraction of replies cut off", ("eval/cut_off", "train/cut_off")),
    ("prompt length", ("actor/prompt_len",)),
    ("token accuracy", ("eval/token_accuracy", "train/token_accuracy")),
    ("accuracy", ("eval/accuracy", "train/accuracy")),
    ("action error", ("eval/action_error", "train/action_error")),
    ("loss", ("actor/loss", "eval/loss")),
    ("value loss", ("actor/value_loss",)),
    ("KL", ("actor/kl",)),
    ("entropy", ("actor/entropy",)),
    ("clip fraction", ("actor/clip_fraction",)),
    ("gradient norm", ("actor/grad_norm",)),
    ("env steps per second", ("env/steps_per_s",)),
    ("tokens per second of the update", ("actor/tokens_per_s",)),
    ("peak memory of a policy process in GiB", ("actor/memory_gib",)),
    ("seconds per step", ("time/step",)),
)
"""Title and metrics of each chart."""
_PROBLEM_WORDS = re.compile(
    r"warning|fail|died|killed|restart|dropped|lost|timed? ?out|non-?finite|error", re.IGNORECASE
)
_SUITE_METRIC = re.compile(r"eval/(?!task_\d+/)[^/]+/success_once")
_MAX_FAILED, _MAX_REPLIES, _LOG_TAIL, _MAX_SUITES = 100, 12, 12, 50


def write_report(folders: Sequence[Path], out: Path, *, embed_bytes: int = EMBED_BYTES) -> list[str]:
    """Write the HTML report of one or more runs; return a summary as lines of text.

    Raises:
        ConfigError: a folder is not a run.
    """
    counts = Counter(folder.name for folder in folders)
    histories = [
        replace(read_history(folder), suffix=f" ({number})" if counts[folder.name] > 1 else "")
        for number, folder in enumerate(folders, start=1)
    ]
    video_index = VideoIndex(page=out, budget=embed_bytes)
    cards = [card for history in histories for card in build_cards(history, video_index)]
    tasks = list(dict.fromkeys(task for history in histories for e in history.evaluations for task in e.tasks))
    lines = _summarize_runs(histories)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = files("embodyrl.reports").joinpath("page.html.j2").read_text(encoding="utf-8")
    charts = _plot_charts(histories)
    text = environment.from_string(template).render(
        title=" vs ".join(h.name for h in histories),
        version=__version__,
        summary=lines,
        runs=[_build_view(history) for history in histories],
        charts=charts,
        num_curves=max([len(histories), *(len(legend) for _, legend, _ in charts)]),
        table=_build_task_table(histories, tasks),
        tasks=tasks,
        cards=cards,
        pairs=pair_cards(cards),
        replies=[sample for history in histories for sample in select_samples(history, _MAX_REPLIES)],
        sources=json.dumps(video_index.sources).replace("<", "\\u003c"),
        differences=[
            (k, [format_value(v) for v in values])
            for k, values in find_differing_settings([h.config for h in histories])
        ],
    )
    write_atomically(out, text)
    return lines


def _summarize_runs(histories: Sequence[History]) -> list[str]:
    lines = []
    for history in histories:
        last = history.evaluations[-1] if history.evaluations else None
        text = f"step {last.step}: {last.score()}" if last else "no evaluation"
        if (unfinished := history.unfinished) is not None:
            count = len(unfinished.episodes)
            text += f"; the evaluation of step {unfinished.step} is unfinished and not counted ({count} episodes)"
        lines.append(f"{history.name}: {text}")
        if count := history.num_missing_rows:
            lines.append(f"  warning: the rows of {count} training steps are missing in metrics.jsonl; costs omit them")
        lines += [f"  {suite}: {score}" for suite, score in (last.suites.items() if last else ())]
    groups = group_by_seed(histories)
    lines += [line for group in groups for line in group.summary()]
    if len(groups) > 1 and (improvement_text := compare_groups(groups[0], groups[-1])):
        lines.append(improvement_text)
    if len(groups) > 1 and all(history.evaluations for history in histories):
        first, second = histories[0], histories[-1]
        if difference := describe_differences(first.config, second.config, {*state_keys(), *SUCCESS_KEYS}):
            names = f"{first.name} and {second.name}"
            return [*lines, f"no paired test of {names}, which were evaluated differently: {difference}"]
        comparisons = compare_suites(first.evaluations[-1].episodes, second.evaluations[-1].episodes)
        names = first.name, second.name
        lines += [comparison.line(names) for comparison in comparisons]
    return lines


def _build_view(history: History) -> dict[str, Any]:
    """Return the data of one run for the template."""
    defaults = {name: key.default for name, key in all_keys().items() if not key.required}
    steps = [row for row in history.rows if step_seconds(row)]
    last = history.evaluations[-1].episodes if history.evaluations else ()
    events = history.text(EVENTS_FILE).splitlines()
    tails = []
    for path in sorted(history.folder.glob("logs/*/*.log"), key=natural_sort_key):
        text = history.text(path.relative_to(history.folder))
        if "Traceback (most recent call last)" in text:
            tails.append((path.relative_to(history.folder).as_posix(), "\n".join(text.splitlines()[-_LOG_TAIL:])))
    return {
        "history": history,
        "what": _describe_run(history),
        "tiles": _build_tiles(history, steps),
        "phases": build_time_tree(sum_times(steps)),
        "faults": [line for line in events if _PROBLEM_WORDS.search(line)],
        "tails": tails,
        "failed": [e for e in last if e.success_once is False][:_MAX_FAILED],
        "settings": changed_settings(history.config, defaults),
        "yaml": history.text("config.yaml"),
    }


def _describe_run(history: History) -> str:
    """Return a line about a run: environment, model, algorithm, seed, date and commit. Unknown values are omitted."""
    values, machine = history.values, history.text("env.txt").splitlines()
    env = next((values[key] for key in ("env.task_suite_name", "env.id", "env.env_type") if values.get(key)), None)
    algorithm = values.get("algorithm.adv_type") if history.rows else None
    commit = next((line[: len("commit ") + 10] for line in machine if line.startswith("commit ")), None)
    date, file = None, history.folder / "overrides.txt"
    if file.is_file():
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.stat().st_mtime))
    parts = (env, values.get("model.model_type"), algorithm, f"seed {values.get('seed', 0)}", date, commit)
    return " · ".join(str(part) for part in parts if part)


def _build_tiles(history: History, steps: Sequence[dict[str, float | None]]) -> list[tuple[str, str, str]]:
    """Return the label, the value and the note of each summary tile of the page."""
    tiles = []
    if history.evaluations:
        endpoints = dict.fromkeys((history.evaluations[0], history.evaluations[-1]))
        scores = [evaluation.score() for evaluation in endpoints]
        form = "{:.0%}" if isinstance(scores[-1], Rate) else "{:.4g}"
        values = " → ".join(form.format(score.value) for score in scores)
        name = "success" if isinstance(scores[-1], Rate) else "return"
        labels = [f"{s.counts} [{', '.join(map(form.format, s.interval))}]" for s in scores]
        tiles.append((name, values, " → ".join(labels)))
    if steps:
        planned = history.values.get("runner.max_steps", 0)
        tiles.append(("steps", f"{steps[-1]['step']:.0f}", f"of {planned}"))
        seconds = run_seconds(history.rows)
        tiles.append(
            ("time", format_duration(seconds), f"{seconds / max(1.0, steps[-1]['step'] or 0.0):.2g} s per step")
        )
        env_steps = sum(row.get("env/steps") or 0 for row in steps)
        if env_steps:
            episodes = sum(row.get("train/episodes") or 0 for row in steps)
            tiles.append(("env steps", f"{env_steps:,.0f}", f"{episodes:,.0f} training episodes"))
        restarts = max(row.get("env/restarts") or 0 for row in steps)
        dropped = sum(row.get("env/dropped_episodes") or 0 for row in steps)
        tiles.append(("restarts", f"{restarts:.0f}", f"{dropped:.0f} episodes dropped"))
    return tiles


def _plot_charts(histories: Sequence[History]) -> list[tuple[str, list[tuple[int, str]], str]]:
    """Return title, legend (color index and text) and plot of each non-empty chart."""
    charts, groups = [], group_by_seed(histories)
    if len(groups) == len(histories):  # in the order of the colors in the header of the page
        groups = [SeedGroup((history,)) for history in histories]
    for title, names in (*_CHARTS, *_list_suite_charts(histories)):
        available = [name for name in names if any(history.has(name) for history in histories)]
        if not available:
            continue
        limits = (0.0, 1.0) if available[0].endswith("/success_once") else None
        if len(histories) > 1:
            available = available[:1]  # one metric per chart: the colors identify the runs
            labels = [group.name for group in groups]
            lines = [_plot_group(group, available[0], color, limits) for color, group in enumerate(groups)]
        else:
            labels = [_get_legend(name) for name in available]
            lines = [build_curve(histories[0], name, name, color) for color, name in enumerate(available)]
        nonempty = [line for line in lines if line.points]
        if not nonempty:  # the seeds of a group share no step
            continue
        log = limits is None and fits_log_axis(nonempty)
        plot = plot_lines(nonempty, limits=limits, log=log)
        title = f"{title} ({available[0]})" if len(available) == 1 else title
        charts.append((f"{title}, log scale" if log else title, list(enumerate(labels)), plot))
    return charts


def _plot_group(group: SeedGroup, metric: str, color: int, limits: tuple[float, float] | None) -> Line:
    """Return the mean curve over the seeds of a group with its 95 % interval, or the curve of a single run."""
    if len(group.runs) == 1:
        return build_curve(group.runs[0], metric, f"{group.name} · {metric}", color=color)
    points = group.curve(metric, limits)
    return Line(
        label=f"{group.name} · {metric}",
        points=[(float(step), mean) for step, mean, _, _ in points],
        band=[(float(step), low, high) for step, _, low, high in points],
        color=color,
    )


def _get_legend(metric: str) -> str:
    """Return the legend text of a metric in a chart with several metrics of one run."""
    kind, _, name = metric.partition("/")
    end = name.rpartition("_")[2]
    return name if _SUITE_METRIC.fullmatch(metric) else f"{kind}, {end}" if end in ("min", "max") else kind


def _list_suite_charts(histories: Sequence[History]) -> list[tuple[str, tuple[str, ...]]]:
    """Return one chart with up to `_MAX_SUITES` validation suites of a run, or one chart per suite for several runs."""
    suites = dict.fromkeys(n for h in histories for row in h.rows[:1] for n in row if _SUITE_METRIC.fullmatch(n))
    names = list(suites)[:_MAX_SUITES]
    if not names:
        return []
    if len(histories) > 1:
        return [(f"success on {name.split('/')[1]}", (name,)) for name in names]
    return [("success by suite", ("eval/success_once", *names))]


def _build_task_table(histories: Sequence[History], tasks: Sequence[str]) -> list[list[str]]:
    """Return a table of scores per task.

    The columns are the first and last evaluation of a single run, or the last evaluation of each of several runs.
    """
    if not tasks:
        return []
    if is_single := len(histories) == 1:
        endpoints = dict.fromkeys((histories[0].evaluations[0], histories[0].evaluations[-1]))
        columns = [(f"step {evaluation.step}", evaluation) for evaluation in endpoints]
    else:
        columns = [(history.name, history.evaluations[-1]) for history in histories if history.evaluations]
    has_change = is_single and len(columns) > 1
    table = [["task", *(name for name, _ in columns), *["change"] * has_change, *["mean steps"] * is_single]]
    for task in [*tasks, None] if len(tasks) > 1 else tasks:
        scores = [evaluation.score(task) for _, evaluation in columns]
        row = [task or "all tasks", *map(str, scores), *[scores[0].change(scores[-1])] * has_change]
        if is_single:
            last = columns[-1][1]
            steps = [e.steps for e in (last.main_episodes if task is None else last.tasks.get(task, ()))]
            row.append(format_number(sum(steps) / len(steps)) if steps else "-")
        table.append(row)
    for suite in dict.fromkeys(name for _, evaluation in columns for name in evaluation.suites):
        suite_scores = [evaluation.suites.get(suite) for _, evaluation in columns]
        endpoints = suite_scores[0], suite_scores[-1]
        change = [endpoints[0].change(endpoints[1]) if endpoints[0] and endpoints[1] else "-"] * has_change
        table.append([f"suite {suite}", *(str(score or "-") for score in suite_scores), *change, *["-"] * is_single])
    return table
