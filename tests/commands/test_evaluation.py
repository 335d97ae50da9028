"""Evaluation: result table, episode rows and recordings."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest
from text_runs import text_config
from toy_runs import toy_config, toy_words, train_toy

from embodyrl.commands.eval_result import EvalResult, print_table, summarize, to_episode_row
from embodyrl.commands.evaluate import evaluate, write_actions
from embodyrl.commands.train import train
from embodyrl.errors import ConfigError
from embodyrl.monitor.console import ConsoleMonitor
from embodyrl.monitor.group import MonitorGroup
from embodyrl.monitor.history import EpisodeRow, read_episodes, read_rows
from embodyrl.monitor.intervals import Rate
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.plan.protocols import protocol_deviations
from embodyrl.scheduler.rollout import RolloutResult
from embodyrl.types import ActionSpec, EnvSpec, Episode, EpisodeSpec, RewardSpec

WORDS = (
    "env.kwargs.tasks=2",
    "env.kwargs.goal=0.6",
    "eval.episodes_per_task=6",
    "env.eval.total_num_envs=4",
    "eval.sampling_params.do_sample=true",
)


def evaluate_toy(folder, *overrides, name="run"):
    return evaluate(toy_config(folder, *WORDS, *overrides, command="eval", name=name))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Run an evaluation with all episodes recorded; return (run folder, result)."""
    folder = tmp_path_factory.mktemp("recorded")
    return folder, evaluate_toy(folder, "video=all")


def episode_rows(result):
    return [json.loads(line) for line in (result.folder / "episodes.jsonl").read_text().splitlines()]


def test_result_table_matches_the_episode_rows(recorded):
    _, result = recorded
    rows = episode_rows(result)
    table = json.loads((result.folder / "eval.json").read_text())
    assert sorted(row["episode"] for row in rows) == list(range(12))
    assert Counter(row["task_id"] for row in rows) == {0: 6, 1: 6}
    assert {row["success_once"] for row in rows} == {True, False}, "both outcomes, or this shows little"
    for task in (*table["tasks"], table["overall"]):
        own = [row for row in rows if task["task_id"] in (-1, row["task_id"])]
        successes = sum(row["success_once"] for row in own)
        assert (task["episodes"], task["successes"]) == (len(own), successes)
        assert task["success_once"] == successes / len(own)
        rate = Rate.of((row["reset_id"], row["success_once"]) for row in own)
        assert (task["low"], task["high"], task["states"]) == (*rate.interval, rate.states)
        assert task["states"] < task["episodes"], "two episodes of some initial states"
        assert task["success_at_end"] == sum(row["success_at_end"] for row in own) / len(own)
        assert task["mean_steps"] == sum(row["steps"] for row in own) / len(own)
    assert table["dropped"] == 0
    assert table["env"] == "toy"
    assert table["env_steps"] == sum(row["steps"] for row in rows)


def test_episode_row_contains_the_fields_needed_to_reproduce_the_episode(recorded):
    for row in episode_rows(recorded[1]):
        assert row["task"] == ("go right", "go left")[row["task_id"]]
        assert row["reset_id"] // 4 == row["task_id"]
        assert row["seed"] >= 1000
        assert row["terminated"] != row["truncated"]
        assert row["terminated"] == row["success_once"]


def test_every_episode_is_recorded_with_a_descriptive_file_name(recorded):
    folder, result = recorded
    files = sorted((folder / "videos" / "run").iterdir())
    assert len(files) == 12
    by_episode = {}
    for path in files:
        match = re.fullmatch(
            r"step000000_task(\d\d)_go_(right|left)_state(\d\d)_seed(\d+)_ep(\d{3})_(success|fail)_(\d+)steps\.mp4",
            path.name,
        )
        assert match, path.name
        by_episode[int(match[5])] = (int(match[1]), int(match[4]), match[6] == "success", int(match[7]), path)
    for row in episode_rows(result):
        task, seed, success, steps, path = by_episode[row["episode"]]
        assert (task, seed, success, steps) == (row["task_id"], row["seed"], row["success_once"], row["steps"])
        assert row["video"] == str(path)
    assert sorted(result.videos) == [str(path) for path in files]


def test_recordings_contain_every_step(recorded):
    folder, result = recorded
    longest = max(episode_rows(result), key=lambda row: row["steps"])
    with imageio.get_reader(longest["video"]) as reader:
        assert reader.get_meta_data()["fps"] == 20
    frames = imageio.mimread(longest["video"])
    assert len(frames) >= longest["steps"]
    assert frames[0].ndim == 3
    assert not [p for p in (folder / "videos").rglob("*") if p.is_file() and p.suffix != ".mp4"]


@pytest.mark.integration
def test_video_mode_failures_keeps_only_failed_episodes(tmp_path):
    result = evaluate_toy(tmp_path, "video=failures")
    failed = {row["episode"] for row in episode_rows(result) if not row["success_once"]}
    names = [p.name for p in (tmp_path / "videos" / "run").iterdir()]
    assert 0 < len(failed) < 12
    assert {int(re.search(r"_ep(\d{3})_fail_", name)[1]) for name in names} == failed
    assert len(names) == len(failed)


def test_video_mode_first_n_keeps_the_first_episodes(tmp_path):
    evaluate_toy(tmp_path, "video=first:3")
    names = sorted(p.name for p in (tmp_path / "videos" / "run").iterdir())
    assert {int(re.search(r"_ep(\d{3})_", name)[1]) for name in names} == {0, 1, 2}


def test_no_videos_are_recorded_by_default(tmp_path):
    result = evaluate_toy(tmp_path, "~eval.episodes_per_task=", "eval.episodes=2")
    assert result.videos == ()
    assert not (tmp_path / "videos").exists()


def test_recording_does_not_change_results(recorded, tmp_path):
    def outcomes(result):
        rows = sorted(episode_rows(result), key=lambda row: row["episode"])
        return [{k: v for k, v in row.items() if k not in ("seconds", "video")} for row in rows]

    assert outcomes(evaluate_toy(tmp_path)) == outcomes(recorded[1])


def test_checkpoint_evaluation_matches_the_validation_of_its_step(tmp_path):
    same = ("eval.sampling_params.do_sample=false", "eval.episodes_per_task=4")
    run = train_toy(tmp_path, *WORDS, *same, "runner.val_check_interval=2", "runner.deterministic=true", name="trained")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    result = evaluate_toy(tmp_path, *same, f"ckpt={run}", "runner.deterministic=true", name="evaluated")
    assert result.folder == tmp_path / "evaluated" / "eval" / "step_000002"
    assert result.overall.success_once == last["eval/success_once"]
    assert result.overall.mean_steps == last["eval/episode_len"]


def test_an_unknown_task_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="tasks 0 to 1"):
        evaluate_toy(tmp_path, "env.eval.task_ids=[2]")


def test_resumed_evaluation_counts_every_episode_once(tmp_path, recorded):
    """The evaluation is interrupted after any row, within a row, and by a crash before the table is written."""
    evaluate_toy(tmp_path)
    folder = tmp_path / "run" / "eval" / "step_000000"
    lines = (folder / "episodes.jsonl").read_text().splitlines(keepends=True)
    (folder / "eval.json").unlink()
    (folder / "episodes.jsonl").write_text("".join(lines[:5]) + lines[5][:40])
    result = evaluate(toy_config(tmp_path, *WORDS, command="eval"), resume=tmp_path / "run")
    rows = episode_rows(result)
    kept = sorted((json.loads(line) for line in lines[:5]), key=lambda row: row["episode"])
    assert rows[:5] == kept
    assert sorted(row["episode"] for row in rows) == list(range(12))
    again = {row["episode"]: row["success_once"] for row in rows}
    assert again == {row["episode"]: row["success_once"] for row in episode_rows(recorded[1])}
    assert result.overall.episodes == 12
    assert result.env_steps == sum(row["steps"] for row in rows[5:])
    finished = evaluate(toy_config(tmp_path, *WORDS, command="eval"), resume=tmp_path / "run")
    assert finished.overall == result.overall
    assert finished.env_steps == 0


def test_resume_starts_a_missing_evaluation_and_rejects_another_step(tmp_path):
    """A process that is killed early leaves a run without an evaluation."""
    run = tmp_path / "run"
    run.mkdir()
    cfg = toy_config(tmp_path, *WORDS, command="eval")
    assert evaluate(cfg, resume=run).overall.episodes == 12
    (run / "eval" / "step_000000").rename(run / "eval" / "step_000007")
    with pytest.raises(ConfigError, match="run evaluates step_000007, but ckpt=None is a checkpoint of step 0"):
        evaluate(cfg, resume=run)


PROTOCOL = (
    "eval.protocol.name=mine",
    "eval.protocol.settings=['eval.episodes_per_task=4','env.eval.task_ids=null','env.eval.state_ids=null']",
    "eval.protocol.horizons={toy: 32}",
    "eval.protocol.sources=[a paper]",
)


def protocol_words(tmp_path, *words):
    typed = toy_words(tmp_path, "launcher=inline", "env.kwargs.tasks=2", "env.kwargs.goal=99", *words, command="eval")
    return [word for word in typed if "max_episode_steps" not in word]


def test_evaluation_protocol_sets_episodes_and_horizon(tmp_path):
    cfg = load_config("eval", protocol_words(tmp_path, *PROTOCOL, "env.eval.total_num_envs=4"))
    assert cfg.env.eval.max_episode_steps == 32
    result = evaluate(cfg)
    assert sorted(row["reset_id"] for row in episode_rows(result)) == list(range(8))
    assert {row["steps"] for row in episode_rows(result)} == {32}
    said = json.loads((result.folder / "eval.json").read_text())["protocol"]
    assert said == {"name": "mine", "followed": True, "departures": [], "sources": ["a paper"]}
    saved = load_saved_config(tmp_path / "run", ["trust=true"])
    assert saved.env.eval.max_episode_steps == 32, "the run's own record says what was played"


@pytest.mark.parametrize(
    ("typed", "found"), [([], 0), (["runner.val_suites=[base,colours]"], 1), (["runner.val_suites=[]"], 1)]
)
def test_protocol_deviations_include_missing_suites(typed, found):
    cfg = load_config("eval", ["env=tabletop", "eval=tabletop_axes", *typed])
    run_plan = build_run_plan(cfg, training=False)
    assert len(protocol_deviations(run_plan.cfg, run_plan.env)) == found


def test_overrides_that_deviate_from_the_protocol_are_listed(tmp_path):
    sampled = ("eval.samples=2", "eval.sampling_params.do_sample=true")
    words = protocol_words(tmp_path, *PROTOCOL, "eval.episodes=3", "env.eval.task_ids=[1]", *sampled)
    result = evaluate(load_config("eval", words))
    assert {row["task_id"] for row in episode_rows(result)} == {1}
    said = json.loads((result.folder / "eval.json").read_text())["protocol"]
    assert (said["followed"], len(episode_rows(result))) == (False, 6)
    assert "eval.samples=2 instead of 1" in said["departures"]
    assert "eval.episodes=3 instead of null" in said["departures"]
    assert "env.eval.task_ids=[1] instead of null" in said["departures"]
    other = protocol_words(tmp_path, *(w.replace("toy: 32", "else: 32") for w in PROTOCOL))
    with pytest.raises(ConfigError, match=r"mine does not cover env 'toy'. Choose one of its envs: else"):
        evaluate(load_config("eval", other))


GO = EnvSpec(name="toy", action=ActionSpec(dim=7), tasks=("go",), states_per_task=(4,))


def played(*success: bool) -> Episode:
    """Return an episode of single-action chunks with these successes."""
    column = np.asarray(success, np.bool_)[:, None]
    return Episode(
        spec=EpisodeSpec(episode_id=0, reset_id=3, task_id=0, group_id=0, member=0, seed=1000, noise_seed=1),
        records=np.arange(len(column)),
        reward=np.full(column.shape, 2.5, np.float32),
        valid=np.ones(column.shape, np.bool_),
        success=column,
        value=np.zeros((len(column), 0), np.float32),
        bootstrap_value=np.zeros(0, np.float32),
        terminated=False,
        truncated=True,
    )


def test_success_at_end_is_the_success_of_the_last_step() -> None:
    """If episodes continue after success, the goal may be lost again."""
    lost, kept = (to_episode_row(played(*steps), GO) for steps in ((False, True, False), (False, True, True)))
    assert (lost.success_once, lost.success_at_end) == (True, False)
    assert (kept.success_once, kept.success_at_end) == (True, True)
    overall = summarize([lost, kept], RolloutResult(), GO, Path()).overall
    assert (overall.success_once, overall.success_at_end) == (1.0, 0.5)


def rows_of(*known: bool) -> list[EpisodeRow]:
    return [to_episode_row(played(False, False), replace(GO, reward=RewardSpec(reports_success=k))) for k in known]


def test_evaluation_without_success_signal_reports_no_success() -> None:
    result = summarize(rows_of(False, False), RolloutResult(), GO, Path())
    assert {name for name in result.metrics() if "success" in name} == set()
    assert result.metrics()["eval/return"] == result.overall.score.value == 5.0
    assert result.overall.success_once is result.overall.low is result.overall.return_low is None
    json.dumps(asdict(result), allow_nan=False, default=str)
    said = table_of(result)
    assert said[0].split() == ["task", "return,", "95", "%", "interval", "steps"]
    assert said[1].split()[:2] == ["go", "5"]
    late = [*rows_of(False), to_episode_row(played(False, True), replace(GO, reward=RewardSpec(reports_success=False)))]
    assert summarize(late, RolloutResult(), GO, Path()).overall.success_once == 0.5, "some only speak at the end"


def table_of(result: EvalResult) -> list[str]:
    out = StringIO()
    print_table(result, MonitorGroup({"console": ConsoleMonitor(out)}).text)
    return out.getvalue().splitlines()


def test_lost_episodes_are_counted_and_reported() -> None:
    result = summarize(rows_of(True, True), RolloutResult(dropped=3), GO, Path())
    assert (result.dropped, result.overall.episodes) == (3, 2)
    assert result.metrics()["eval/dropped_episodes"] == 3.0
    assert "INCOMPLETE: 3 of 5 episodes" in table_of(result)[0]


TABLETOP = (
    "env=tabletop",
    "model=scripted",
    "launcher=inline",
    "env.eval.task_ids=[0,5]",
    "eval.episodes_per_task=2",
    "runner.logger.backends=[console]",
)


def evaluate_axes(tmp_path, name, *words):
    places = (f"runner.output_dir={tmp_path}", f"runner.experiment_name={name}")
    return evaluate(load_config("eval", [*TABLETOP, *places, *words]))


def test_suites_are_reported_separately_and_compared(tmp_path, capsys):
    from embodyrl.reports.page import write_report

    noisy = ("runner.val_suites=[all]", "model.expert_noise=5")
    first = evaluate_axes(tmp_path, "first", *noisy)
    assert [row.task for row in first.suites] == [
        "tabletop",
        *(f"tabletop_{a}" for a in ("colours", "positions", "phrasings")),
    ]
    assert (first.overall.episodes, sum(row.episodes for row in first.suites)) == (4, 16)
    rows = episode_rows(first)
    assert {row["suite"] for row in rows if row["task_id"] in (0, 5)} == {"tabletop"}
    assert first.metrics()["eval/success_once"] == first.suites[0].success_once
    assert first.metrics()["eval/tabletop_positions/success_once"] == first.suites[2].success_once
    said = capsys.readouterr().out
    assert "touch the red block" in said
    assert "make contact" not in said, "one row for all suites, in the words of the first"
    evaluate_axes(tmp_path, "second", "runner.val_suites=[all]")
    won = [sum(not row["success_once"] for row in rows if row["suite"] == suite.task) for suite in first.suites]
    assert sum(won) > 0
    lines = write_report([tmp_path / "first", tmp_path / "second"], tmp_path / "page.html")
    tests = [line for line in lines if "McNemar" in line]
    assert len(tests) == 4
    for line, suite, count in zip(tests, first.suites, won, strict=True):
        assert suite.task in line
        assert f"success only first: 0, only second: {count};" in line
    evaluate_axes(tmp_path, "third", "env.axis=positions")
    lines = write_report([tmp_path / "first", tmp_path / "third"], tmp_path / "page.html")
    assert "evaluated differently: env.axis=base and positions" in lines[-1]


def test_training_validates_on_additional_suites(tmp_path):
    from embodyrl.reports.page import write_report

    train_words = (
        "env=tabletop",
        "launcher=inline",
        "runner.max_steps=1",
        "runner.val_check_interval=1",
        "algorithm.group_size=2",
        "env.train.total_num_envs=4",
        "env.train.max_episode_steps=4",
        "env.eval.max_episode_steps=4",
        "eval.episodes=2",
        "env.eval.task_ids=[0]",
        "runner.val_suites=[positions]",
        "algorithm.rollout_epoch=1",
        "runner.logger.backends=[jsonl]",
        f"runner.output_dir={tmp_path}",
        "runner.experiment_name=run",
    )
    result = train(load_config("train", list(train_words)))
    assert [row.task for row in result.last_eval.suites] == ["tabletop", "tabletop_positions"]
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert all(row["eval/episodes"] == 1 for row in rows)
    assert all("eval/tabletop_positions/success_once" in row for row in rows)
    assert write_report([tmp_path / "run"], tmp_path / "page.html")[1].startswith("  tabletop: ")
    assert "suite tabletop_positions" in (tmp_path / "page.html").read_text()


def test_games_are_paired_by_initial_state_not_by_final_text(tmp_path):
    """Fails if episodes are paired by their last observation, which depends on the policy."""
    from embodyrl.reports.paired import compare_episodes

    words = (
        "env.words=embodyrl.envs.text.game:number",
        "env.max_turns=3",
        "algorithm.sampling_params.max_new_tokens=1",
    )
    cfg = text_config(tmp_path, *words, "runner.val_check_interval=2", "actor.optim.lr=0.01", task="gym")
    run = train(cfg).run
    first, last = (read_episodes(run / f"eval/step_{step:06}/episodes.jsonl") for step in (0, 2))
    assert {row.task for row in (*first, *last)} == {"FrozenLake-v1"}
    assert compare_episodes(first, last).pairs == 4


def test_greedy_and_temperature_settings_are_passed_to_the_policy(tmp_path):
    """The echo environment returns the last action: near temperature 0 the greedy action, at 1 another."""
    words = ("env.kwargs.echo=true", "eval.episodes_per_task=2")

    def returns(name, *more):
        return [row["return"] for row in episode_rows(evaluate_toy(tmp_path, *words, *more, name=name))]

    greedy = returns("greedy", "eval.sampling_params.do_sample=false")
    assert returns("cold", "eval.sampling_params.temperature=0.001") == pytest.approx(greedy, abs=0.01)
    assert returns("warm", "eval.sampling_params.temperature=1.0") != pytest.approx(greedy, abs=0.01)


def test_actions_are_stored_by_episode_number(tmp_path):
    def played(number: int) -> Episode:
        column = np.zeros((1, 1), np.float32)
        spec = EpisodeSpec(episode_id=number, reset_id=0, task_id=0, group_id=0, member=0, seed=0, noise_seed=0)
        return Episode(
            spec=spec,
            records=np.arange(1),
            reward=column,
            valid=column == 0,
            success=column > 0,
            value=column,
            bootstrap_value=column[0],
            terminated=False,
            truncated=True,
            action=np.full((1, 1, 7), float(number), np.float32),
        )

    write_actions(tmp_path, [played(5), played(3)])
    with np.load(tmp_path / "actions.npz") as kept:
        assert {name: float(kept[name].mean()) for name in kept} == {"5": 5.0, "3": 3.0}
