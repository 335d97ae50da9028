"""Sampled replies before and after training, on the console, in `view` and in the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from text_runs import text_config

from embodyrl.cli.report import build_dashboard
from embodyrl.commands.train import train
from embodyrl.monitor.history import EpisodeRow
from embodyrl.reports.history import read_history
from embodyrl.reports.page import write_report
from embodyrl.reports.samples import pick_samples


def test_samples_are_ordered_newly_solved_then_failed_then_solved() -> None:
    def row(episode: int, success: bool) -> EpisodeRow:
        said = (("user", "copy"), ("assistant", "x"))
        raw = dict.fromkeys(("terminated", "truncated"), False) | {"episode_return": 0.0, "seconds": 0.0, "steps": 1}
        raw |= {"task_id": 0, "task": "copy", "reset_id": episode, "seed": episode, "video": None, "episode": episode}
        return EpisodeRow(**raw, success_once=success, success_at_end=success, conversation=said)

    before = [row(0, True), row(1, False), row(2, False), row(3, True)]
    after = [row(0, True), row(1, False), row(2, True), row(3, True)]
    assert [sample.after.episode for sample in pick_samples(before, after, 4)] == [2, 1, 0, 3]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    words = ("runner.val_check_interval=1", "runner.max_steps=1", "eval.show_replies=2")
    return train(text_config(folder, *words)).run


@pytest.mark.integration
def test_sample_rows_contain_the_conversation_and_task(trained: Path) -> None:
    first, last = read_history(trained).evaluations
    assert {row.task for row in (*first.episodes, *last.episodes)} == {"copy"}
    for row in last.episodes:
        assert [role for role, _ in row.conversation] == ["user", "assistant"]
        assert not any(c in text for _, text in row.conversation for c in "\x1e\x1f")


@pytest.mark.integration
def test_samples_show_replies_before_and_after(trained: Path) -> None:
    history = read_history(trained)
    samples = pick_samples(history.evaluations[0].episodes, history.evaluations[-1].episodes, 3)
    assert len(samples) == 3
    assert all(s.before is not None and s.before.reset_id == s.after.reset_id for s in samples)
    write_report([trained], trained / "page.html")
    page = (trained / "page.html").read_text()
    assert page.count('class="card talk"') == 4
    assert "<small>before</small>" in page
    assert "\x1e" not in page
    console = Console(width=120, record=True, file=(trained / "view.txt").open("w"))
    console.print(build_dashboard(history))
    assert "before" in console.export_text()


@pytest.mark.integration
def test_console_shows_the_configured_number_of_samples(trained: Path) -> None:
    events = (trained / "logs" / "events.log").read_text().splitlines()
    assert sum("] " not in line and "  user  " in line for line in events) == 4, "two after each of two validations"
