"""Videos of selected episodes before and after training, and across a resume."""

import json
from pathlib import Path

import imageio.v3 as iio
import pytest
from toy_runs import running_crew, train_toy

from embodyrl.commands.before_after import record, select_episodes_to_record
from embodyrl.commands.evaluate import read_evaluation
from embodyrl.commands.train import train
from embodyrl.errors import ConfigError
from embodyrl.monitor.history import EpisodeRow, read_rows
from embodyrl.monitor.protocol import Monitor
from embodyrl.plan.config import load_config, load_saved_config


def row(episode: int, success: bool | None, *, task: int = 0, steps: int = 5, earned: float = 0.0) -> EpisodeRow:
    return EpisodeRow(
        episode=episode,
        task_id=task,
        task="go",
        reset_id=episode,
        seed=0,
        success_once=success,
        success_at_end=success,
        episode_return=earned,
        steps=steps,
        terminated=False,
        truncated=True,
        seconds=0.1,
        video=None,
    )


def test_newly_solved_episodes_are_shown_before_failures():
    before = [row(k, k == 4, task=k // 5) for k in range(10)]
    learned = {1: 3, 2: 9, 7: 4}
    after = [row(k, k in learned, task=k // 5, steps=learned.get(k, 5)) for k in range(10)]
    assert select_episodes_to_record(before, after, 2) == [2, 7], "the longer one of task 0, and the only one of task 1"
    chosen = select_episodes_to_record(before, after, 10)
    assert {chosen[2], chosen[3]} <= {0, 3, 5, 6, 8, 9}
    assert [e for e in chosen if e < 5][-1] == 4, "what got worse comes last"
    assert sorted(chosen) == list(range(10))


def test_largest_and_smallest_return_gains_are_shown_without_success():
    before = [row(k, None, earned=1.0) for k in range(5)]
    after = [row(k, None, earned=gain) for k, gain in enumerate([2.0, 9.0, 0.5, 3.0, 4.0])]
    assert select_episodes_to_record(before, after, 2) == [1, 2]


WORDS = ("video=changed:2", "runner.val_check_interval=1", "runner.save_interval=1", "eval.episodes=6")


@pytest.mark.integration
def test_resumed_run_keeps_its_first_evaluation(tmp_path: Path) -> None:
    run = train_toy(tmp_path, "~video_cfg.base_dir=", *WORDS, "runner.max_steps=1")
    assert len([*(run / "videos").glob("step*.mp4")]) == 4, "two episodes before and after, in the run's own folder"
    result = train(load_saved_config(run, ["trust=true", "runner.max_steps=2"]), resume=run)
    assert result.first_eval is not None
    assert result.last_eval is not None
    assert (result.first_eval.folder.name, result.last_eval.folder.name) == ("step_000000", "step_000002")
    saved = json.loads((run / "eval" / "step_000000" / "eval.json").read_text())
    assert result.first_eval.overall.mean_return == saved["overall"]["mean_return"]
    assert len(result.first_eval.recordings) == len(result.last_eval.recordings) == 2
    for evaluation in (result.first_eval, result.last_eval):
        rows = {r["episode"]: r for r in read_rows(evaluation.folder / "episodes.jsonl")}
        for episode, path in evaluation.recordings:
            played = rows[episode]
            outcome = "success" if played["success_once"] else "fail"
            assert path.endswith(f"_{outcome}_{played['steps']}steps.mp4"), "the video is of that very episode"
            assert played["video"] == path
            assert len(iio.imread(path)) >= played["steps"]


class Lines(Monitor):
    """Logger that stores the lines of text."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def text(self, line: str) -> None:
        self.shown.append(line)


@pytest.mark.integration
def test_diverged_replay_leaves_no_video(tmp_path: Path) -> None:
    """Two of four episodes have recorded outcomes that differ from those of their actions."""
    run = train_toy(tmp_path, *WORDS, "eval.episodes=4", "runner.max_steps=1")
    folder = run / "eval" / "step_000001"
    played = read_rows(folder / "episodes.jsonl")
    lying = [{**r, "success_once": r["success_once"] != (r["episode"] % 2 == 1), "video": None} for r in played]
    (folder / "episodes.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lying))
    lines = Lines()
    with running_crew(tmp_path, *WORDS, "eval.episodes=4") as crew:
        result = read_evaluation(folder, crew.run_plan.env)
        assert result is not None
        (videos := tmp_path / "films").mkdir()
        shown = record(crew.run_plan, crew.workers, result, [0, 1, 2, 3], videos, lines)
    kept = dict(shown.recordings)
    assert sorted(kept) == [0, 2]
    assert sorted(videos.iterdir()) == sorted(Path(path) for path in kept.values())
    assert {r["episode"]: r["video"] for r in read_rows(folder / "episodes.jsonl")} == {1: None, 3: None, **kept}
    assert [line.split(" had another outcome")[0] for line in lines.shown] == [
        "episode 1 of step 1",
        "episode 3 of step 1",
    ]


def test_single_evaluation_has_no_comparison():
    with pytest.raises(ConfigError, match="video=changed:2 compares two validations"):
        load_config("eval", ["env=tabletop", "video=changed:2"])
