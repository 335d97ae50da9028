"""The report: its numbers, and the page in a real browser."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, DRIVER, browser
from processes import listening, start_cli
from rich.console import Console
from run_files import TASKS, write_run

from embodyrl.cli.discover.command import _format_run
from embodyrl.cli.discover.runs import describe_run
from embodyrl.cli.main import main
from embodyrl.cli.report import build_dashboard
from embodyrl.monitor.history import EpisodeRow
from embodyrl.monitor.intervals import wilson
from embodyrl.monitor.phases import build_time_tree
from embodyrl.reports import media
from embodyrl.reports.charts import Line, build_curve, find_differing_settings, plot_lines, ticks
from embodyrl.reports.history import Evaluation, History, read_history
from embodyrl.reports.page import _build_task_table, _build_tiles, write_report
from embodyrl.reports.paired import compare_episodes

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def test_axis_ticks_are_round_and_span_the_data() -> None:
    assert ticks(0.0, 0.9) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(-3, 17) == [-5.0, 0.0, 5.0, 10.0, 15.0, 20.0]
    assert ticks(2.0, 2.0)[0] < 2.0 < ticks(2.0, 2.0)[-1]


def test_line_plot_spans_the_axes() -> None:
    svg = plot_lines([Line(label="a<b", points=[(0, 0.0), (10, 1.0)], band=[(0, 0.0, 0.5), (10, 0.5, 1.0)])])
    assert '<polyline class="line c0" points="52,192 428,12"/>' in svg
    assert '<polygon class="band c0" points="52,102 428,12 428,102 52,192"/>' in svg
    assert "a&lt;b · step 10: 1 [0.5, 1]" in svg


def across(run: Path) -> Path:
    """Move half of a run's episodes to another suite with equal tasks, in which all fail in 100 steps."""
    for file in run.glob("eval/*/episodes.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [row | {"suite": "base", "success_once": True, "steps": 10} for row in rows]
        rows += [row | {"suite": "swap", "success_once": False, "steps": 100, "task_id": 9} for row in rows]
        file.write_text("".join(json.dumps(row | {"episode": k}) + "\n" for k, row in enumerate(rows)))
    return run


def test_task_table_covers_the_main_suite_only(tmp_path: Path) -> None:
    """Fails if episodes of all suites are merged because their tasks have equal names."""
    run = across(write_run(tmp_path / "run"))
    table = _build_task_table([read_history(run)], TASKS)
    assert [cells[-1] for cells in table] == ["mean steps", "10", "10", "10", "-", "-"]
    (run / "metrics.jsonl").unlink()
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(build_dashboard(read_history(run)))
    shown = {line.split("│")[1].strip(): line for line in console.export_text().splitlines() if line.startswith("│")}
    assert "100.0 %" in shown["all tasks"]
    assert "100.0 %" in shown[TASKS[0]]
    assert "(6/6)" in shown["suite base"]
    assert "(0/6)" in shown["suite swap"]


def test_seeds_without_a_common_step_have_no_curve(tmp_path: Path) -> None:
    """One of the runs was killed before its first validation."""
    runs = [write_run(tmp_path / f"run-{seed}", f"seed={seed}") for seed in range(2)]
    (runs[1] / "metrics.jsonl").write_text('{"step": 1, "train/return": 0.5}\n')
    write_report(runs, tmp_path / "page.html")
    assert "eval/success_once" not in (tmp_path / "page.html").read_text()


def test_every_curve_of_many_suites_has_a_color(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    suites = {f"eval/suite_{k}/success_once": 0.5 for k in range(8)}
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/success_once": 0.5} | suites) + "\n")
    write_report([run], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    classes = {*re.findall(r'class="line (c\d+)"', page)}
    assert {f"c{k}" for k in range(9)} <= classes
    assert classes <= {*re.findall(r"\.line\.(c\d+) { stroke: var\(--c[0-6]\)", page)}


def test_success_curve_has_a_wilson_band(tmp_path: Path) -> None:
    history = read_history(write_run(tmp_path / "runs" / "a"))
    line = build_curve(history, "train/success_once", "train", 0)
    assert line.points == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert line.band[0] == (1, *wilson(2, 8))
    long = read_history(write_run(tmp_path / "runs" / "b", steps=240))
    pooled = build_curve(long, "train/success_once", "train", 0)
    assert len(pooled.points) == 120
    assert pooled.band[0] == (2, *wilson(4, 16))
    assert build_curve(long, "actor/loss", "loss", 0).band[0] == (2, 0.5, 1.0)


def test_pooled_success_rate_is_weighted_by_episodes(tmp_path: Path) -> None:
    """240 steps in 120 points: the first of each pair has 30 failed episodes, the second 10 successful ones."""
    rows = tuple(
        {"step": k + 1, "train/success_once": float(k % 2), "train/episodes": 10.0 if k % 2 else 30.0}
        for k in range(240)
    )
    line = build_curve(History(folder=tmp_path, config={}, rows=rows, evaluations=()), "train/success_once", "train", 0)
    assert line.points[0] == (2, 0.25)
    assert line.band[0] == (2, *wilson(10, 40))


def test_paired_episodes_share_task_state_and_seed(tmp_path: Path) -> None:
    history = read_history(write_run(tmp_path / "runs" / "a"))
    first, last = history.evaluations
    line = compare_episodes(first.episodes, last.episodes).sentence(("A", "B"))
    assert line == (  # 2 * (1 + 5) / 2^5
        "paired on 6 episodes with the same initial state and seed: success only A: 1, only B: 4; +50.0 points "
        "[-21.9, 96.9]; McNemar p = 0.375 (no significant difference)"
    )
    assert str(last.score(TASKS[0])) == "66.7 % [20.8, 93.9] (2/3)"


def played(*episodes: tuple[int, int, bool | None, float]) -> Evaluation:
    """Return an evaluation of episodes of one task: initial state, seed, success, return."""
    rows = (
        EpisodeRow(
            episode=k,
            task_id=0,
            task="go",
            reset_id=state,
            seed=seed,
            success_once=success,
            success_at_end=success,
            episode_return=earned,
            steps=5,
            terminated=bool(success),
            truncated=not success,
            seconds=0.1,
            video=None,
        )
        for k, (state, seed, success, earned) in enumerate(episodes)
    )
    return Evaluation(step=0, episodes=tuple(rows))


def test_runs_with_different_initial_states_are_not_paired(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / axis, f"env.axis={axis}") for axis in ("base", "colours")]
    lines = write_report(runs, tmp_path / "report.html")
    assert lines[-1].endswith("which were evaluated differently: env.axis=base and colours")
    assert not any(line.startswith("paired") for line in lines)


def test_episodes_of_one_state_are_paired_by_seed() -> None:
    """Without the seed, the last episode would replace all others."""
    first = played((3, 1000, True, 1.0), (3, 1001, False, 0.0))
    assert compare_episodes(first.episodes, first.episodes).sentence(("A", "B")).startswith("paired on 2 episodes")
    assert "success only A: 0, only B: 0;" in compare_episodes(first.episodes, first.episodes).sentence(("A", "B"))
    assert "success only A: 1, only B: 0;" in compare_episodes(
        first.episodes, played((3, 1000, False, 0.0)).episodes
    ).sentence(("A", "B"))
    assert "no paired test" in compare_episodes(first.episodes, played((3, 1002, True, 1.0)).episodes).sentence(
        ("A", "B")
    )


def test_repeated_episodes_do_not_increase_significance() -> None:
    """Five states with ten episodes each: five states are compared, not fifty episodes."""
    before = played(*((s, 1000 + k, False, 0.0) for k in range(10) for s in range(5)))
    after = played(*((s, 1000 + k, True, 1.0) for k in range(10) for s in range(5)))
    assert str(after.score()) == f"100.0 % [{100 * wilson(5, 5)[0]:.1f}, 100.0] (50/50, 5 states)"
    line = compare_episodes(before.episodes, after.episodes).sentence(("A", "B"))
    assert (
        "only B: 50; +100.0 points [19.6, 100.0]; McNemar over 5 states p = 0.0625 (no significant difference)" in line
    )


def test_return_is_reported_if_success_is_unknown() -> None:
    before = played(*((s, 1000, None, 10.0 * s) for s in range(6)))
    after = played(*((s, 1000, None, 10.0 * s + 4 + s % 2) for s in range(6)))
    assert str(before.score()).startswith("25 [")
    line = compare_episodes(before.episodes, after.episodes).sentence(("A", "B"))
    assert "return of B minus that of A: 4.5 [" in line
    assert line.endswith("(differ)")


def test_phase_times_sum_to_the_whole_step() -> None:
    row = {"time/step": 10.0, "time/validate": 5.0, "time/rollout": 6.0, "time/simulate": 4.0, "time/update": 3.0}
    tree = {phase.name: (phase.depth, phase.seconds, phase.share) for phase in build_time_tree(row)}
    assert tree["rollout"] == (0, 6.0, 0.4)
    assert tree["simulate"] == (1, 4.0, pytest.approx(4 / 15))
    assert tree["other"] == (0, 1.0, pytest.approx(1 / 15))
    assert build_time_tree({"eval/success_once": 0.5}) == []


def test_differing_settings_are_listed() -> None:
    assert find_differing_settings([{"a": {"b": 1, "c": []}, "d": {}}, {"a": {"b": 2, "c": []}, "d": {"e": 1}}]) == [
        ("a.b", [1, 2]),
        ("d", [{}, None]),
        ("d.e", [None, 1]),
    ]


def test_report_page_loads_no_external_resources(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    lines = write_report([write_run(tmp_path / "runs" / "a", "seed=7", videos=2)], out)
    assert lines == ["a: step 3: 66.7 % [30.0, 90.3] (4/6)"]
    page = out.read_text()
    assert "17% → 67%" in page
    assert "close the &lt;drawer&gt;" in page
    assert "close the <drawer>" not in page
    assert "env worker 0 died: SIGSEGV; restarted" in page
    assert "all is well" not in page
    assert "ValueError: a &lt;bad&gt; day" in page
    assert "<td><code>seed</code></td><td><code>7</code></td>" in page
    assert not re.search(r'(?:src|href)="(?!#)|url\(http|@import', page)


def test_recordings_beyond_the_budget_are_linked(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a", videos=2)
    size = max(p.stat().st_size for p in (tmp_path / "videos" / "a").iterdir())
    shelf = media.VideoIndex(page=run / "report.html", budget=size)
    cards = media.build_cards(read_history(run), shelf)
    sources = [shelf.sources[card.media] for card in cards]
    assert len(cards) == 4
    assert [s.startswith("data:video/mp4") for s in sources] == [True, False, False, False]
    assert (run / sources[1]).resolve().is_file()
    assert [(a.step, b.step, a.episode.episode) for a, b in media.pair_cards(cards)] == [(0, 3, 0), (0, 3, 1)]


def test_runs_in_folders_with_equal_names_are_distinguished(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name / "runs" / "a", videos=1) for name in ("old", "new")]
    (first, *_, last) = write_report(runs, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert first == "a (1): step 3: 66.7 % [30.0, 90.3] (4/6)"
    assert "only a (1): 0, only a (2): 0" in last
    assert page.count('<div class="duo">') == 2
    assert [page.count(f'data-run="a ({number})"') for number in (1, 2)] == [2, 2]


def test_report_command_compares_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write_run(tmp_path / "runs" / "a"), write_run(tmp_path / "runs" / "b", "actor.optim.lr=3e-4")
    assert main(["report", str(first), str(second), "--out", str(tmp_path / "c.html"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert "success only a: 0, only b: 0; +0.0 points [" in said["summary"][2]
    assert (
        "<td><code>actor.optim.lr</code></td><td><code>0.0004</code></td><td><code>0.0003</code></td>"
        in (tmp_path / "c.html").read_text()
    )
    assert main(["report", str(first)]) == 0
    assert (first / "report.html").is_file()
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "is not a run" in said
    assert "`embodyrl list runs`" in said


def test_options_that_exclude_each_other_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, gif = str(write_run(tmp_path / "runs" / "a")), ["--gif", str(tmp_path / "a.gif")]
    for arguments in ([run, run, *gif], [run, "--watch", *gif]):
        assert main(["report", *arguments]) == 2
        assert "--gif shows the episodes of one run" in capsys.readouterr().err
    assert main(["report", run, "--watch", "--json"]) == 2
    assert not (tmp_path / "runs" / "a" / "report.html").exists()


PROBE = """<script>
window.addEventListener("error", (event) => failures.push(event.message));
const failures = [];
(async () => {
  const video = document.querySelector("#gallery video");
  video.src ||= url(video.dataset.v);
  await video.play().catch((reason) => failures.push(String(reason)));
  for (let k = 0; k < 200 && video.currentTime < 0.2; k++) await new Promise((done) => setTimeout(done, 50));
  const shown = () => [...document.querySelectorAll("#gallery > .card")].filter((card) => !card.hidden);
  const count = [document.getElementById("count").textContent];
  document.querySelector("button[data-outcome=success]").click();
  const outcomes = shown().map((card) => card.dataset.outcome);
  const task = document.querySelector("select[data-filter=task]");
  task.value = task.options[1].value;
  task.dispatchEvent(new Event("change", { bubbles: true }));
  count.push(document.getElementById("count").textContent);
  const targets = [...document.querySelectorAll("nav a")].map((a) => document.querySelector(a.getAttribute("href")));
  const said = { width: video.videoWidth, time: video.currentTime, count, outcomes, failures,
    dead: targets.filter((t) => t === null).length, wide: document.documentElement.scrollWidth - innerWidth };
  const pre = document.createElement("pre");
  pre.id = "probe";
  pre.textContent = JSON.stringify(said);
  document.body.append(pre);
})();
</script></body>"""


def in_browser(page: Path) -> dict[str, Any]:
    """Return the result of a script at the end of the page in a real browser."""
    assert BROWSER is not None
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text().replace("</body>", PROBE))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=30000"]
    flags += ["--autoplay-policy=no-user-gesture-required", f"--user-data-dir={page.parent / 'profile'}"]
    done = subprocess.run([BROWSER, *flags, probed.as_uri()], capture_output=True, text=True, timeout=90, check=True)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)
    assert found, done.stderr[-2000:]
    return json.loads(found[1])


@pytest.mark.integration
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("embed_bytes", [media.EMBED_BYTES, 0])
def test_videos_play_and_filters_work_in_chromium(tmp_path: Path, embed_bytes: int) -> None:
    runs = [write_run(tmp_path / "runs" / name, videos=4) for name in ("a", "b")]
    write_report(runs, tmp_path / "report.html", embed_bytes=embed_bytes)
    assert ("data:video/mp4" in (tmp_path / "report.html").read_text()) == bool(embed_bytes)
    seen = in_browser(tmp_path / "report.html")
    assert seen["failures"] == []
    assert seen["width"] == 64
    assert seen["time"] >= 0.2
    assert seen["count"] == ["16 of 16", "4 of 16"]
    assert seen["outcomes"] == ["success"] * 8
    assert seen["dead"] == 0
    assert seen["wide"] <= 0


@pytest.mark.integration
@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no Chromium with its driver on this machine")
def test_report_fits_a_phone_screen(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "runs" / name, videos=4) for name in ("a_run_with_a_name_that_is_rather_long_indeed", "b")
    ]
    with browser(tmp_path / "profile", width=400) as page:
        for names in (runs, runs[:1]):
            write_report(names, tmp_path / "report.html")
            page.open((tmp_path / "report.html").as_uri())
            page.until("document.readyState == 'complete'")
            assert page.run("return screen.width") == 400
            outside = "e.getBoundingClientRect().right > 400.5 && !e.closest('.scroll, .columns .card')"
            wide = f"return [...document.querySelectorAll('body *')].filter(e => {outside}).map(e => e.outerHTML)"
            assert page.run(wide) == []
            assert page.run("return document.documentElement.scrollWidth") <= 400


@pytest.mark.integration
def test_watch_serves_a_current_report_on_localhost_only(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "mine")
    (run / "lock").write_text(f"process {os.getpid()} on {socket.gethostname()}")
    browser, opened, address = (tmp_path / name for name in ("browser", "opened.html", "address.txt"))
    browser.write_text(f'#!/bin/sh\ncp -p "${{1#file://}}" {opened}\necho "$@" > {address}\n')
    browser.chmod(0o755)
    started = start_cli("report", str(run), "--watch", "--open", cwd=tmp_path, env={"BROWSER": str(browser)})
    started.wait_for(started.out, lines=1)
    started.wait_for(address, lines=1)
    url = started.out.read_text().split()[0]
    assert "token" not in address.read_text(), "other users read the command line of the browser"
    assert f"url={url}" in opened.read_text()
    assert opened.stat().st_mode & 0o777 == 0o600
    assert listening([started.pid]) == {"127.0.0.1"}

    def look(**headers: str) -> str:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return answer.read().decode()

    first = look()
    assert 'http-equiv="refresh"' in first, "while it runs"
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"step": 4, "train/success_once": 0.987, "time/step": 9.0}) + "\n")
    (run / "lock").unlink()
    second = look()
    assert 'http-equiv="refresh"' not in second, "it has ended"
    assert re.sub('<meta http-equiv="refresh"[^>]*>', "", first) != second, "step 4 is there"
    for stranger in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"X-Token": "another"}):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            look(**stranger)
    at = urllib.parse.urlsplit(url)
    with socket.create_connection(("127.0.0.1", at.port)) as impatient:
        impatient.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
        impatient.sendall(f"GET /?{at.query} HTTP/1.0\r\nHost: {at.netloc}\r\n\r\n".encode())
    (run / "config.yaml").unlink()
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        look()
    assert "config.yaml is missing" in refused.value.read().decode()
    assert started.err.read_text() == ""
    started.signal_group(signal.SIGINT)
    assert started.wait() == 130


def test_run_without_success_is_reported_by_return(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a")
    for path in run.glob("eval/*/episodes.jsonl"):
        path.write_text(re.sub(r'"success_(once|at_end)": \w+', r'"success_\1": null', path.read_text()))
    metrics = run / "metrics.jsonl"
    metrics.write_text(re.sub(r'"(eval|train)/success_once": [\d.]+', r'"\1/return": 7.5', metrics.read_text()))
    (line,) = write_report([run], tmp_path / "report.html")
    assert re.fullmatch(r"a: step 3: 0\.6667 \[0\.12\d*, 1\.2\d*\] \(6 episodes\)", line)
    page = (tmp_path / "report.html").read_text()
    assert "<small>return</small><b>0.1667 → 0.6667</b>" in page
    assert "<small>success</small>" not in page
    assert "Failed episodes" not in page
    assert "return 7.5" in describe(run) or "return    7.5" in describe(run)


def describe(run: Path) -> str:
    return _format_run(**describe_run(run))


def test_curve_end_labels_do_not_overlap() -> None:
    ends = ((0.90, 0), (0.93, 1), (0.91, 2))
    drawn = plot_lines([Line(label=str(k), points=[(0, 0.1), (1, y)], color=k) for y, k in ends], limits=(0, 1))
    heights = sorted(float(y) for y in re.findall(r'class="value c\d" x="[\d.]+" y="([\d.]+)"', drawn))
    assert len(heights) == 3
    assert min(after - before for before, after in pairwise(heights)) >= 12


def test_summary_tiles_match_hand_computed_values(tmp_path: Path) -> None:
    """Three steps of 10 s with 100 env steps and 8 episodes, the last with 5 s of validation; restarts accumulate."""
    history = read_history(write_run(tmp_path / "runs" / "a"))
    more = [{}, *({"env/restarts": float(n), "env/dropped_episodes": 2.0} for n in (1, 1, 4))]
    rows = tuple(row | own for row, own in zip(history.rows, more, strict=True))
    told = replace(history, rows=rows)
    found = {label: (value, note) for label, value, note in _build_tiles(told, rows[1:])}
    assert found == {
        "success": ("17% → 67%", found["success"][1]),
        "steps": ("3", "of 3"),
        "time": ("35 s", "12 s per step"),
        "env steps": ("300", "24 training episodes"),
        "restarts": ("4", "6 episodes dropped"),
    }
