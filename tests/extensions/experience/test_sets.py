"""The command `data`: descriptions, joined and filtered data sets."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "demonstrations"))
from demos import card, demonstration

from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.extensions.demonstrations.cards import read_card
from embodyrl.extensions.demonstrations.checks import check_layout
from embodyrl.extensions.demonstrations.layout import Actor, Demonstration
from embodyrl.extensions.demonstrations.reader import load_demonstrations
from embodyrl.extensions.demonstrations.writer import DatasetWriter, read_episodes
from embodyrl.extensions.experience.command import data

FLAGS = ("success", "failure", "min_return", "max_return", "actor", "policy_version")


def write(root: Path, numbers: range, actor: Actor, version: int, **collected: object) -> list[Demonstration]:
    writer = DatasetWriter(root, replace(card(**collected), actors=True))
    written = []
    for number in numbers:
        one = demonstration(number, 3 + number)
        actors = np.full(len(one), actor)
        written.append(replace(one, actor=actors, source=replace(one.source, version=version)))
        writer.append(written[-1])
    writer.flush()
    writer.close()
    return written


def run(*words: object, **flags: object) -> int:
    values = dict.fromkeys(FLAGS) | {"json": True} | flags
    return data(argparse.Namespace(words=[str(word) for word in words], **values))


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path, list[Demonstration]]:
    """Return a set of the policy with a correction, a set of the expert, and all of their episodes."""
    own = write(tmp_path / "own", range(4), Actor.policy, 7, state_ids=[0, 4])
    shown = write(tmp_path / "shown", range(4, 23), Actor.expert, -1, state_ids=[5, 9])
    return tmp_path / "own", tmp_path / "shown", own + shown


def test_merged_set_contains_all_episodes_of_both(two, tmp_path: Path, capsys) -> None:
    own, shown, written = two
    assert run("merge", tmp_path / "both", own, shown) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["episodes"], found["frames"]) == (23, sum(map(len, written)))
    assert found["versions"] == {"-1": 19, "7": 4}
    assert found["actions"] == {"policy": sum(map(len, written[:4])), "expert": sum(map(len, written[4:]))}
    assert found["success"] == pytest.approx(12 / 23)
    assert check_layout(tmp_path / "both") == []
    assert read_card(tmp_path / "both").collected["state_ids"] == [0, 9]
    demos = load_demonstrations(tmp_path / "both")
    for name in ("images", "state", "action", "reward", "success"):
        np.testing.assert_array_equal(getattr(demos, name), np.concatenate([getattr(d, name) for d in written]))
    assert demos.reset_id.tolist() == [d.source.reset_id for d in written]


def test_interrupted_merge_continues(two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, shown, written = two
    appended = DatasetWriter.append

    def dying(writer: DatasetWriter, one: Demonstration) -> None:
        if one.source.seed == written[12].source.seed:
            writer.flush()
            raise KeyboardInterrupt
        appended(writer, one)

    with monkeypatch.context() as patch:
        patch.setattr(DatasetWriter, "append", dying)
        with pytest.raises(KeyboardInterrupt):
            run("merge", tmp_path / "both", own, shown)
    assert len(read_episodes(tmp_path / "both")) == 12
    run("merge", tmp_path / "both", own, shown)
    seeds = [row["embodyrl/seed"] for row in read_episodes(tmp_path / "both")]
    assert seeds == [d.source.seed for d in written]


@pytest.mark.parametrize(
    ("flags", "seeds"),
    [
        ({"success": True}, [100, 102]),
        ({"failure": True}, [101, 103]),
        ({"min_return": "0.5"}, [100, 102]),
        ({"max_return": "0.5"}, [101, 103]),
        ({"policy_version": "7", "failure": True}, [101, 103]),
        ({"actor": "policy"}, [100, 101, 102, 103]),
    ],
)
def test_filter_keeps_the_matching_episodes(two, tmp_path: Path, flags: dict[str, object], seeds: list[int]) -> None:
    assert run("filter", two[0], tmp_path / "some", **flags) == 0
    assert [row["embodyrl/seed"] for row in read_episodes(tmp_path / "some")] == seeds
    assert check_layout(tmp_path / "some") == []


def test_wrong_requests_are_refused(two, tmp_path: Path) -> None:
    own, shown, _ = two
    out = tmp_path / "out"
    for words, flags, reason in (
        (("join", own), {}, "unknown action 'join'"),
        (("merge", out, own), {}, "at least two"),
        (("filter", own, out), {}, "needs a condition"),
        (("info", own), {"success": True}, "--success applies only"),
        (("filter", own, out), {"success": True, "failure": True}, "exclude each other"),
        (("filter", own, out), {"actor": "cat"}, "--actor cat: use"),
        (("filter", own, out), {"min_return": "much"}, "expected a number"),
        (("filter", own, out), {"actor": "person"}, "No episode"),
    ):
        with pytest.raises(ConfigError, match=reason):
            run(*words, **flags)
    assert not out.exists()
    other = replace(card(), env=replace(card().env, state_dim=2))
    writer = DatasetWriter(tmp_path / "other", other)
    writer.append(replace(demonstration(0), state=demonstration(0).state[:, :2]))
    writer.flush()
    writer.close()
    with pytest.raises(ConfigError, match="state_dim"):
        run("merge", out, own, tmp_path / "other")
    writer = DatasetWriter(tmp_path / "slow", replace(card(), fps=10))
    writer.append(demonstration(0))
    writer.flush()
    writer.close()
    with pytest.raises(ConfigError, match=r"slow differs from .*own in fps \(10 and 20\)"):
        run("merge", out, own, tmp_path / "slow")
    run("merge", out, own, shown)
    with pytest.raises(EmbodyError, match="collected with other settings"):
        run("merge", out, shown, own)
