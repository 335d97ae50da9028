"""The command `data`: descriptions, joined and filtered data sets."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "demonstrations"))
from demos import card, demonstration
from lerobot_sets import LENGTHS, edit_episodes, numbers, write_set, write_v2_set

from embodyrl.cli.data import data
from embodyrl.commands.sft_data import _resolve_matching_path
from embodyrl.commands.sft_setup import _describe_data
from embodyrl.data.cards import read_card
from embodyrl.data.checks import check_layout, describe_dataset_differences
from embodyrl.data.layout import Actor, Demonstration
from embodyrl.data.reader import load_demonstrations
from embodyrl.data.settings import DemonstrationSettings
from embodyrl.data.writer import DatasetWriter, read_episodes
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.types import GripperConvention

FLAGS = ("success", "failure", "min_return", "max_return", "actor", "policy_version", "episodes")


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
    return data(argparse.Namespace(arguments=[str(word) for word in words], **values))


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path, list[Demonstration]]:
    """Return a set of the policy with a correction, a set of the expert, and all of their episodes."""
    own = write(tmp_path / "own", range(4), Actor.policy, 7, state_ids=[0, 4])
    shown = write(tmp_path / "shown", range(4, 23), Actor.expert, -1, state_ids=[5, 9])
    return tmp_path / "own", tmp_path / "shown", own + shown


def test_merged_set_contains_all_episodes_of_both_sets(two, tmp_path: Path, capsys) -> None:
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


def test_unknown_success_stays_unknown_in_copies(tmp_path: Path, capsys) -> None:
    for name, parts in (("first", (0, 1)), ("second", (2, 3))):
        writer = DatasetWriter(tmp_path / name, card())
        for number in parts:
            one = demonstration(number)
            writer.append(replace(one, success=None) if number % 2 else one)
        writer.flush()
        writer.close()
    assert run("merge", tmp_path / "copy", tmp_path / "first", tmp_path / "second") == 0
    assert json.loads(capsys.readouterr().out)["success"] == 1.0
    assert [row["embodyrl/success"] for row in read_episodes(tmp_path / "copy")] == [True, None, True, None]
    with pytest.raises(ConfigError, match="No episode"):
        run("filter", tmp_path / "copy", tmp_path / "failed", failure=True)


MINE, OTHER = {"path": "pkg:mine"}, {"path": "pkg:other"}


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ({"expert_noise": 0.3}, {"expert_noise": 0.3}, {"expert_noise": 0.3}),
        ({"expert_noise": 0.3}, {"expert_noise": 0.0}, {"labels": "expert"}),
        ({"labels": "expert"}, {"labels": "executed"}, {"labels": "expert"}),
        ({"labels": "executed"}, {}, {}),
        ({"reward": MINE}, {"reward": MINE}, {"reward": MINE}),
        ({"reward": MINE}, {"reward": OTHER}, {"reward": {"path": "(several)"}}),
        ({"reward": MINE}, {}, {"reward": {"path": "(several)"}}),
    ],
)
def test_copies_keep_the_source_of_actions_and_rewards(tmp_path: Path, capsys, first, second, kept) -> None:
    """Otherwise off-policy learning would take labels for executed actions."""
    write(tmp_path / "a", range(2), Actor.expert, -1, **first)
    write(tmp_path / "b", range(2, 4), Actor.expert, -1, **second)
    assert run("merge", tmp_path / "both", tmp_path / "a", tmp_path / "b") == 0
    found = read_card(tmp_path / "both").collected
    assert {name: found[name] for name in ("expert_noise", "labels", "reward") if name in found} == kept


def test_filtered_set_has_the_executed_actions_of_its_source(tmp_path: Path, capsys) -> None:
    write(tmp_path / "all", range(4), Actor.expert, -1, expert_noise=0.3)
    assert run("filter", tmp_path / "all", tmp_path / "good", success=True) == 0
    good, whole = load_demonstrations(tmp_path / "good"), load_demonstrations(tmp_path / "all")
    kept = np.concatenate(
        [np.arange(a, b) for a, b in zip(whole.start, whole.stop, strict=True) if whole.success[a:b].any()]
    )
    assert 0 < len(kept) < len(whole.action)
    assert np.abs(good.executed - good.action).max() > 0.1
    np.testing.assert_array_equal(good.executed, whole.executed[kept])


def test_merged_data_sets_keep_the_tasks_of_all_sources(tmp_path: Path, capsys) -> None:
    """Tasks of the first set only, and numbers of the wrong tasks, before."""
    tasks = ("open the door", "wash the cup")
    second = replace(card(), env=replace(card().env, tasks=tasks, states_per_task=(7, 3)))
    write(tmp_path / "own", range(4), Actor.policy, 7)
    writer = DatasetWriter(tmp_path / "other", second)
    for number, reset_id in ((0, 6), (1, 8)):
        one = demonstration(number)
        origin = replace(one.source, task_id=number, reset_id=reset_id)
        writer.append(replace(one, instruction=tasks[number], source=origin))
    writer.flush()
    writer.close()
    assert run("merge", tmp_path / "both", tmp_path / "own", tmp_path / "other") == 0
    env = read_card(tmp_path / "both").env
    assert env.tasks == ("sweep the floor", "open the door", "wash the cup")
    assert env.states_per_task == (5, 7, 3)
    rows = read_episodes(tmp_path / "both")
    for row in rows:
        assert env.tasks[row["embodyrl/task_id"]] == row["tasks"][0]
    assert [env.task_of(row["embodyrl/reset_id"]) for row in rows[4:]] == [(1, 6), (2, 1)]
    assert check_layout(tmp_path / "both") == []


def test_unknown_outcomes_are_listed_as_unknown(tmp_path: Path, capsys) -> None:
    without = replace(card(), without=("next.reward", "next.success"))
    writer = DatasetWriter(tmp_path / "plain", without)
    writer.append(demonstration(0))
    writer.flush()
    writer.close()
    assert check_layout(tmp_path / "plain") == []
    assert read_card(tmp_path / "plain") == without
    assert run("info", tmp_path / "plain") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["success"], found["mean_return"]) == (None, None)
    with pytest.raises(ConfigError, match="No episode"):
        run("filter", tmp_path / "plain", tmp_path / "out", failure=True)
    run("merge", tmp_path / "twice", tmp_path / "plain", tmp_path / "plain")
    assert read_card(tmp_path / "twice").without == without.without
    write(tmp_path / "own", range(2), Actor.policy, 7)
    with pytest.raises(ConfigError, match=r"differs .* in unknown columns \(next.reward, next.success and none\)"):
        run("merge", tmp_path / "both", tmp_path / "own", tmp_path / "plain")


def test_outcomes_of_third_party_sets_are_read(tmp_path: Path, capsys) -> None:
    columns = {"action": numbers(3), "next.success": won, "next.reward": lambda e, t: [0.5]}
    write_set(tmp_path / "known", columns=columns)
    write_v2_set(tmp_path / "older", columns=columns)
    write_set(tmp_path / "unknown")
    assert run("info", tmp_path / "known", tmp_path / "older", tmp_path / "unknown") == 0
    known, older, unknown = json.loads(capsys.readouterr().out)
    mean = 0.5 * sum(LENGTHS) / 3
    for found in (known, older):
        assert (found["success"], found["mean_return"]) == (pytest.approx(1 / 3), pytest.approx(mean))
    assert (unknown["success"], unknown["mean_return"]) == (None, None)
    demos = load_demonstrations(tmp_path / "known")
    assert demos.success.nonzero()[0].tolist() == [LENGTHS[0] + LENGTHS[1] - 1]
    assert demos.reward.tolist() == [0.5] * sum(LENGTHS)


def won(episode: int, step: int) -> list[float]:
    return [float((episode, step) == (1, LENGTHS[1] - 1))]


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


def test_invalid_data_commands_are_rejected(two, tmp_path: Path) -> None:
    own, shown, _ = two
    out = tmp_path / "out"
    for words, flags, reason in (
        (("join", own), {}, r"for example `embodyrl data info.*'join' is unknown.*info, merge, filter, replay"),
        ((own,), {}, f"`embodyrl data info {own}`"),
        (("merge", out, own), {}, "at least two"),
        (("filter", own, out), {}, "needs a condition"),
        (("info", own), {"success": True}, "--success applies only"),
        (("filter", own, out), {"success": True, "failure": True}, "cannot be combined"),
        (("filter", own, out), {"actor": "cat"}, "--actor cat is unknown"),
        (("filter", own, out), {"min_return": "much"}, "must be a number"),
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


def test_episode_with_two_instructions_is_not_copied(tmp_path: Path) -> None:
    tasks = ("touch the red block", "touch the blue block")
    write_set(tmp_path / "two", tasks=tasks, task_of=lambda episode, step: int(episode == 1 and step > 2))
    write_set(tmp_path / "one")
    with pytest.raises(ConfigError, match=r"two: episode 1 has 2 instructions \(touch the red block, touch the blue"):
        run("merge", tmp_path / "both", tmp_path / "one", tmp_path / "two")
    assert not (tmp_path / "both").exists()


def test_copied_third_party_dataset_accepts_convention_keys(tmp_path: Path) -> None:
    """A copy of a copy, too; the action of the data is checked against the convention."""
    opens = {"observation.state": numbers(4), "action": lambda e, t: [0.5, float(t % 2)]}
    for name in ("one", "other"):
        write_set(tmp_path / name, columns=opens)
    run("merge", tmp_path / "both", tmp_path / "one", tmp_path / "other")
    run("merge", tmp_path / "three", tmp_path / "both", tmp_path / "one")
    for name in ("both", "three"):
        root = tmp_path / name
        assert read_card(root).env.action.gripper is None
        env = read_card(root, DemonstrationSettings(gripper=[1, 0], image_rotation_deg=180)).env
        assert (env.action.gripper, env.cameras.rotation_deg) == (GripperConvention(open=1, closed=0, index=-1), 180)
        with pytest.raises(ConfigError, match=r"action -1 of .*, which is in 0..1"):
            load_demonstrations(root, DemonstrationSettings(gripper=[1, -1]))
        with pytest.raises(ConfigError, match="contains these values"):
            read_card(root, DemonstrationSettings(gripper=[1, 0], action_key="other"))
    write(tmp_path / "own", range(2), Actor.policy, 7)
    with pytest.raises(ConfigError, match=r"data.gripper: .* contains these values"):
        read_card(tmp_path / "own", DemonstrationSettings(gripper=[1, 0]))


@pytest.mark.parametrize(
    ("names", "other", "said"),
    [
        (["x", "y", "z", "g"], ["g", "x", "y", "z"], r"the order of 'observation.state' \(g, x, y, z and x, y, z, g\)"),
        ({"motors": ["a", "b", "c", "d"]}, {"motors": ["b", "a", "c", "d"]}, "the order of 'observation.state'"),
        (["x", "y", "z", "g"], {"axes": ["x", "y", "z", "g"]}, ""),
        (["x", "y", "z", "g"], None, ""),
    ],
)
def test_datasets_with_differently_ordered_features_are_not_joined(tmp_path: Path, names, other, said) -> None:
    for name, order in (("one", names), ("other", other)):
        info = write_set(tmp_path / name) / "meta/info.json"
        found = json.loads(info.read_text())
        found["features"]["observation.state"]["names"] = order
        info.write_text(json.dumps(found))
    one, more = tmp_path / "one", tmp_path / "other"
    found = describe_dataset_differences((more, read_card(more)), (one, read_card(one)))
    assert (re.match(said, found) is not None) if said else found == ""


@pytest.mark.parametrize(("rates", "said"), [((30, 29.97), ""), ((10, 20), r"fps \(20 and 10\)")])
def test_datasets_with_different_frame_rates_are_not_joined(tmp_path: Path, rates, said) -> None:
    for name, fps in zip(("one", "other"), rates, strict=True):
        write_set(tmp_path / name, fps=fps)
    words = ("merge", tmp_path / "both", tmp_path / "one", tmp_path / "other")
    if not said:
        assert run(*words) == 0
        return
    with pytest.raises(ConfigError, match=said):
        run(*words)
    with pytest.raises(ConfigError, match=f"other differs from data.path in {said}"):
        _resolve_matching_path(str(tmp_path / "other"), DemonstrationSettings(path=str(tmp_path / "one")))


def test_info_counts_instructions_by_step_and_warns_of_missing_episodes(tmp_path: Path, capsys) -> None:
    """The table of episodes may lack its tasks, and meta/info.json may declare other numbers."""
    write_set(tmp_path / "one", info={"total_episodes": 9})
    edit_episodes(tmp_path / "one", lambda rows: rows.__setitem__(slice(None), [row | {"tasks": None} for row in rows]))
    assert run("info", tmp_path / "one") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["tasks"] == {"touch the red block": 3}
    assert "declares 9 episodes, but meta/episodes has 3" in found["warnings"][0]
    run("info", tmp_path / "one", json=False)
    assert "warning  " in capsys.readouterr().out
    assert _describe_data(tmp_path / "one").endswith(f"3 episodes, {sum(LENGTHS)} frames of arm")
