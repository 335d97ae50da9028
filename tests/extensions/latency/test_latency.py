"""Success against delay: the command, its table and its plot."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from embodyrl.cli.main import main

WORDS = "env=tabletop model=flow_small launcher=inline eval.episodes=6 video=none"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Evaluate a checkpoint without keys, with a delay of 0, and with delays."""
    out = tmp_path_factory.mktemp("runs")
    variants = {
        "without": "",
        "zero": "env.control.latency_steps=0 rollout.chunk_overlap=0",
        "naive": "env.control.latency_steps=2",
        "guided": "env.control.latency_steps=2 model.rtc=guided",
    }
    for name, words in variants.items():
        place = f"runner.output_dir={out} runner.experiment_name={name}"
        assert main(["eval", *f"{WORDS} {place} {words}".split()]) == 0
    return [out / name for name in variants]


def episodes(run: Path) -> list[dict[str, object]]:
    lines = (run / "eval" / "step_000000" / "episodes.jsonl").read_text().splitlines()
    kept = ("episode", "reset_id", "success_once", "return", "steps")
    rows = [{name: row[name] for name in kept} for row in map(json.loads, lines)]
    return sorted(rows, key=lambda row: row["episode"])


def test_delay_zero_matches_a_run_without_delay(runs):
    without, zero, naive, _ = map(episodes, runs)
    assert zero == without
    assert naive != without


def test_table_and_plot_pool_runs_of_one_method_and_delay(runs, tmp_path, capsys):
    plot = tmp_path / "delay.svg"
    capsys.readouterr()
    assert main(["latency", *map(str, runs), "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["delay", "guided", "naive"]
    assert [line.split()[0] for line in lines[1:]] == ["0", "2", "plot"]
    assert lines[1].split()[1] == "-", "no guided run without a delay"
    assert "(4/12" in lines[1] or "/12, 6 states" in lines[1]
    root = ElementTree.fromstring(plot.read_text())
    names = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"naive", "guided", "delay, env steps", "0", "2"} <= {*names}
    assert main(["latency", *map(str, runs), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["method"], row["delay"], row["runs"], row["episodes"]) for row in rows] == [
        ("guided", [2, 2], 1, 6),
        ("naive", [0, 0], 2, 12),
        ("naive", [2, 2], 1, 6),
    ]


def test_a_run_without_an_evaluation_is_refused(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("env: {env_type: tabletop}\n")
    assert main(["latency", str(tmp_path)]) != 0
    assert "no complete evaluation" in capsys.readouterr().err
    assert main(["latency"]) != 0
    assert "needs runs of `embodyrl eval`" in capsys.readouterr().err


def finished(folder: Path, name: str, config: str) -> str:
    run = folder / name
    place = run / "eval" / "step_000000"
    place.mkdir(parents=True)
    (run / "config.yaml").write_text(config)
    row = {"task": "t", "task_id": 0, "reset_id": 0, "seed": 0, "episode": 0, "terminated": True, "truncated": False}
    more = {"return": 1.0, "steps": 3, "seconds": 0.1, "video": None}
    done = row | more | {"success_once": True, "success_at_end": True}
    (place / "episodes.jsonl").write_text(json.dumps(done) + "\n")
    (place / "eval.json").write_text("{}")
    return str(run)


def test_methods_and_environments_are_not_mixed(tmp_path, capsys):
    delayed = "env: {env_type: tabletop, control: {latency_steps: 2"
    naive = finished(tmp_path, "naive", f"{delayed}}}}}\n")
    state = finished(tmp_path, "state", f"{delayed}, observe_committed: true}}}}\n")
    other = finished(tmp_path, "other", "env: {env_type: gym, id: CartPole-v1}\n")
    assert main(["latency", naive, state]) == 0
    assert " ".join(capsys.readouterr().out.splitlines()[0].split()) == "delay committed state naive"
    assert main(["latency", naive, other]) == 2
    assert "(env.env_type=tabletop and gym)" in capsys.readouterr().err
    robots = [finished(tmp_path, r, f"env: {{env_type: robots, robot: {r}}}\n") for r in ("pusht", "fetch_reach")]
    assert main(["latency", *robots]) == 2
    assert "(env.robot=pusht and fetch_reach)" in capsys.readouterr().err
    seen = finished(tmp_path, "seen", "env: {env_type: tabletop_history, history: 2}\n")
    assert main(["latency", naive, seen]) == 0
    capsys.readouterr()
    assert main(["latency", naive, "--plot", str(tmp_path / "plot.png")]) == 2
    assert "ends in .svg" in capsys.readouterr().err
