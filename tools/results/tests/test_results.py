"""The table of results: page, reruns, drift."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from embodyrl_results.command import main
from embodyrl_results.drift import differences, prediction_interval
from embodyrl_results.page import page_text
from embodyrl_results.table import open_table, read_card, score_text

from embodyrl.reports.card import format_card

pytestmark = pytest.mark.timeout(1800)
TABLE = open_table(None)
TINY = "train experiment=cartpole runner.val_check_interval=24 eval.episodes=10"
"""From a return of about 30 to the maximum of 500."""


PINNED = (
    *("env.train.max_episode_steps=320", "env.eval.max_episode_steps=320", "env.train.max_episode_steps=200"),
    *("env.eval.max_episode_steps=200", "reward.mode=replace", "reward.weights.success=1", "env.reward_coef=1"),
)
"""Overrides that replace values of presets that changed after the cards were written."""


def test_page_matches_the_cards() -> None:
    page = (TABLE.folder / "index.md").read_text(encoding="utf-8")
    assert page == page_text(TABLE), "run embodyrl-results page"


def test_links_to_rows_have_a_target() -> None:
    page = (TABLE.folder / "index.md").read_text(encoding="utf-8")
    targets = re.findall(r'<a id="(\w+)"></a>', page)
    assert targets.count("tabletop") == 1
    assert sorted(targets) == sorted(TABLE.recipes)
    docs = TABLE.folder.parent
    for path in (docs.parent / "README.md", *docs.rglob("*.md")):
        for name in re.findall(r"(?:results/|\()index\.md#(\w+)", path.read_text(encoding="utf-8")):
            assert name in targets, f"{path}: {name}"


def test_every_card_has_a_readable_page() -> None:
    cards = sorted((TABLE.folder / "cards").glob("*.json"))
    assert len(cards) >= 6
    for path in cards:
        card = read_card(path)
        stored = path.with_suffix(".md").read_text(encoding="utf-8")
        for figures in card["figures"]:
            assert figures["rows"][0]["text"] in stored, path
        assert card["command"] in stored
        assert format_card(card).splitlines()[0] == stored.splitlines()[0]


def test_cards_belong_to_the_command_of_their_recipe() -> None:
    for recipe in TABLE.recipes.values():
        for card in TABLE.stored(recipe):
            typed = card["command"].replace("'", "").split()
            fixed = [word for word in recipe.command.split()[1:] if "{out}" not in word and word not in PINNED]
            assert [word for word in fixed if word not in typed] == [], recipe.name


def test_recipes_compose() -> None:
    from embodyrl.plan.config import load_config

    for recipe in TABLE.recipes.values():
        if "ckpt=" not in recipe.command:
            assert load_config("train", recipe.arguments(recipe.seeds[0], Path("runs"))[1:]).seed == recipe.seeds[0]


def card(value: float, episodes: int = 100) -> dict[str, object]:
    row = {"kind": "success", "value": value, "low": 0, "high": 1, "episodes": episodes, "text": f"{value}"}
    return {"figures": [row | {"rows": [row]}]}


def test_score_of_several_seeds_has_an_interval_over_seeds() -> None:
    cards = [card(value) for value in (0.8, 0.9, 1.0)]
    assert score_text(cards, -1) == "90.0 % [65.2, 100.0] (80.0, 90.0, 100.0)"
    assert score_text(cards, 0) == "-", "without an evaluation before training"


def test_seeds_with_equal_rates_have_the_interval_of_one_seed() -> None:
    row = {"kind": "success", "value": 1.0, "low": 0.963, "high": 1.0, "episodes": 100, "text": "100.0 %"}
    cards = [{"figures": [{"rows": [row]}]}] * 3
    assert score_text(cards, -1) == "100.0 % [96.3, 100.0] (100.0, 100.0, 100.0)"
    returns = row | {"kind": "return", "value": 500.0, "low": 500.0, "high": 500.0}
    assert score_text([{"figures": [{"rows": [returns]}]}] * 3, -1) == "500 (500, 500, 500)", "no variance, no interval"


@pytest.mark.parametrize("seeds", [1, 3, 10])
def test_prediction_interval_has_nominal_coverage(seeds: int) -> None:
    """Seeds differ by ten points where several are stored; a single one shows its episodes alone."""
    rng = np.random.default_rng(0)
    spread = 0.1 if seeds > 1 else 0.0
    inside = 0
    for _ in range(3000):
        chances = rng.normal(0.6, spread, 2 * seeds).clip(0, 1)
        values = rng.binomial(100, chances) / 100
        rows = [{"kind": "success", "value": value, "episodes": 100} for value in values[:seeds]]
        low, high = prediction_interval(rows, seeds)
        inside += low <= values[seeds:].mean() <= high
    assert 0.92 <= inside / 3000 <= 0.98


def test_return_without_an_interval_has_an_infinite_prediction_interval() -> None:
    rows = [{"kind": "return", "value": 0.0, "high": None, "episodes": 10}]
    assert prediction_interval(rows, 1) == (-np.inf, np.inf)


def test_differing_conditions_are_reported() -> None:
    stored = {"command": "embodyrl train", "config_sha256": "0", "sources": {"mine": "1"}, "model": {"weights": "w"}}
    stored |= {"commit": "c", "machine": {}, "costs": {}}
    assert differences([stored], [stored | {"command": "embodyrl train seed=3 runner.output_dir=runs"}]) == []
    changed = stored | {"sources": {"mine": "2"}, "costs": {"cpu_hours": 2.0}}
    assert differences([stored | {"costs": {"cpu_hours": 1.0}}], [changed]) == [
        "  own code: mine 1 stored, mine 2 new",
        "  CPU-seconds: 3600 stored, 7200 new",
    ]


def test_accepting_without_a_new_card_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipes.toml").write_text(f'[tiny]\ntitle = "Tiny"\ncommand = "{TINY}"\nseeds = [0]\n')
    assert main(["accept", "tiny", "--table", str(tmp_path), "--out", str(tmp_path / "none")]) == 2
    assert "there is no new result card" in capsys.readouterr().err
    assert not (tmp_path / "index.md").exists()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with one tiny recipe and the stored cards of three real runs."""
    folder = tmp_path_factory.mktemp("table")
    (folder / "recipes.toml").write_text(f'[tiny]\ntitle = "Tiny"\ncommand = "{TINY}"\nseeds = [0, 1, 2]\n')
    place = ["--table", str(folder), "--out", str(folder / "first")]
    assert main(["run", "--all", *place]) == 0
    assert main(["accept", "--all", *place]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.integration
def test_accepted_cards_are_on_the_page(table: Path) -> None:
    row = next(line for line in (table / "index.md").read_text().splitlines() if line.startswith("| Tiny"))
    assert "[0](cards/tiny_seed0.md), [1](cards/tiny_seed1.md), [2]" in row
    stored = read_card(table / "cards" / "tiny_seed0.json")
    assert stored["figures"][-1]["rows"][0]["value"] > 2 * stored["figures"][0]["rows"][0]["value"]
    assert stored["costs"]["largest_process_mib"] > 50


@pytest.mark.slow
@pytest.mark.integration
def test_queue_skips_finished_runs(table: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = (table / "first" / "queue.jsonl").read_text()
    assert [json.loads(row)["exit"] for row in rows.splitlines()] == [0, 0, 0]
    assert main(["run", "tiny", "--table", str(table), "--out", str(table / "first")]) == 0
    assert (table / "first" / "queue.jsonl").read_text() == rows
    assert "3 of 3 runs have a card" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.integration
def test_card_of_an_earlier_command_is_not_used(table: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipes = table / "recipes.toml"
    saved = recipes.read_text()
    recipes.write_text(saved.replace(TINY, TINY + " actor.optim.lr=1e-7"))
    place = ["--table", str(table), "--out", str(table / "first")]
    try:
        assert [main([action, "tiny", *place]) for action in ("run", "check", "accept")] == [1, 2, 2]
    finally:
        recipes.write_text(saved)
    assert capfd.readouterr().err.replace("\n", "").count("a card of another command") >= 3


@pytest.mark.slow
@pytest.mark.integration
def test_unchanged_recipe_does_not_drift(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--table", str(table), "--out", str(table / "first")]) == 0
    assert "no drift" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.integration
def test_changed_learning_rate_is_reported_as_drift(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipes = table / "recipes.toml"
    saved = recipes.read_text()
    recipes.write_text(saved.replace(TINY, TINY + " actor.optim.lr=1e-7 actor.optim.value_lr=1e-7"))
    place = ["--table", str(table), "--out", str(tmp_path / "changed")]
    try:
        assert main(["run", "tiny", *place]) == 0
        capsys.readouterr()
        assert main(["check", *place]) == 3
    finally:
        recipes.write_text(saved)
    lines = capsys.readouterr().out
    assert "drift: tiny" in lines
    assert "actor.optim.lr=1e-7" in lines, "the command is named as a possible cause"


@pytest.mark.integration
def test_preparation_runs_once_for_all_seeds(tmp_path: Path) -> None:
    prepare = "train experiment=cartpole runner.max_steps=1 runner.val_check_interval=-1 runner.output_dir={out}"
    command = "train experiment=cartpole ckpt={out}/start runner.only_eval=true eval.episodes=2"
    (tmp_path / "recipes.toml").write_text(
        f'[own]\ntitle = "Own"\nprepare = ["{prepare} runner.experiment_name=start"]\n'
        f'command = "{command}"\nseeds = [0, 1]\n'
    )
    out = tmp_path / "out"
    assert main(["run", "own", "--table", str(tmp_path), "--out", str(out)]) == 0
    rows = [json.loads(line) for line in (out / "queue.jsonl").read_text().splitlines()]
    assert [row["run"] for row in rows] == ["own_prepare1", "own_seed0", "own_seed1"]
    assert read_card(out / "own_seed1" / "card.json")["model"]["weights"] == f"{out}/start"


@pytest.mark.integration
def test_preparation_may_be_a_command_without_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "recipes.toml").write_text(
        '[own]\ntitle = "Own"\nprepare = ["list envs"]\ncommand = "train env=no_such_env"\n'
    )
    out = tmp_path / "out"
    main(["run", "own", "--table", str(tmp_path), "--out", str(out)])
    rows = [json.loads(line) for line in (out / "queue.jsonl").read_text().splitlines()]
    assert (rows[0]["arguments"], rows[0]["exit"]) == ("list envs", 0)
    assert rows[1]["arguments"].endswith("runner.on_existing=resume")


@pytest.mark.integration
def test_changed_preparation_runs_again(tmp_path: Path) -> None:
    """Results must not be of the data of an earlier command."""
    out = tmp_path / "out"
    for steps in (1, 1, 2):
        prepare = f"train experiment=cartpole runner.max_steps={steps} --dry-run"
        (tmp_path / "recipes.toml").write_text(
            f'[own]\ntitle = "Own"\nprepare = ["{prepare}"]\ncommand = "train env=no_such_env"\n'
        )
        main(["run", "own", "--table", str(tmp_path), "--out", str(out)])
    rows = [json.loads(line) for line in (out / "queue.jsonl").read_text().splitlines()]
    assert [row["run"] for row in rows] == ["own_prepare1", "own_seed0", "own_seed0", "own_prepare1", "own_seed0"]


@pytest.mark.integration
def test_failed_run_is_reported_and_has_no_card(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lost = '[lost]\ntitle = "Lost"\nprepare = ["collect env=no_such_env"]\ncommand = "train env=tabletop"\n'
    (tmp_path / "recipes.toml").write_text(f'[bad]\ntitle = "Bad"\ncommand = "train env=no_such_env"\n{lost}')
    place = ["--table", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["run", "lost", *place]) == 1
    assert "lost_prepare1.log name" in capfd.readouterr().err.replace("\n", "")
    assert [*(tmp_path / "out").glob("lost*")] == [tmp_path / "out" / "lost_prepare1.log"]
    assert main(["run", "bad", *place]) == 1
    assert "failed" in capfd.readouterr().out
    assert main(["check", *place]) == 2
