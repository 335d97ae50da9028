"""Datasets round-trip, also after a crash during writing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from demos import ENV, card, demonstration

from embodyrl.config.compose import flatten
from embodyrl.data import reader
from embodyrl.data import writer as writer_module
from embodyrl.data.cards import read_card
from embodyrl.data.checks import check_layout
from embodyrl.data.layout import Actor, Card, Demonstration
from embodyrl.data.reader import join_demonstrations, load_demonstrations
from embodyrl.data.statistics import QUANTILES, compute_image_stats, compute_vector_stats, count_pixels
from embodyrl.data.tables import read_episodes
from embodyrl.data.writer import DatasetWriter
from embodyrl.errors import EmbodyError


def write(root: Path, demonstrations: list[Demonstration], **options: bool) -> None:
    writer = DatasetWriter(root, card(**options))
    for d in demonstrations:
        writer.append(d)
    writer.flush()
    writer.close()


def test_images_states_and_actions_round_trip_exactly(tmp_path: Path) -> None:
    written = [demonstration(n, 3 + n % 4) for n in range(23)]  # more than one file
    write(tmp_path, written)
    assert len(list(tmp_path.glob("data/*/*.parquet"))) == 2
    demos = load_demonstrations(tmp_path)
    for name in ("images", "state", "action", "reward", "success"):
        found, expected = getattr(demos, name), np.concatenate([getattr(d, name) for d in written])
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    assert demos.instruction.tolist() == [d.instruction for d in written for _ in range(len(d))]
    assert (demos.stop - demos.start).tolist() == [len(d) for d in written]
    assert demos.reset_id.tolist() == [d.source.reset_id for d in written]
    assert read_card(tmp_path).env == ENV


def test_actors_and_policy_versions_round_trip(tmp_path: Path) -> None:
    """A person takes over for two steps; sets without the column have unknown authors."""
    own, taken = demonstration(0, 4), demonstration(1, 5)
    actor = np.array([Actor.policy, Actor.person, Actor.person, Actor.policy, Actor.expert])
    own = replace(own, source=replace(own.source, version=7))
    writer = DatasetWriter(tmp_path / "new", replace(card(), actors=True))
    for d in (own, replace(taken, actor=actor)):
        writer.append(d)
    writer.flush()
    writer.close()
    assert check_layout(tmp_path / "new") == []
    assert load_demonstrations(tmp_path / "new").actor.tolist() == [0, 0, 0, 0, 0, 2, 2, 0, 1]
    assert [row["embodyrl/version"] for row in read_episodes(tmp_path / "new")] == [7, -1]
    write(tmp_path / "old", [own])
    assert load_demonstrations(tmp_path / "old").actor.tolist() == [Actor.unknown] * 4


def test_videos_round_trip_approximately(tmp_path: Path) -> None:
    ramp = np.linspace(0, 200, 24, dtype=np.uint8)[None, None, None, :, None]
    cameras = np.array([0, 40], np.uint8)[None, :, None, None, None]
    smooth = [
        replace(d, images=np.broadcast_to(ramp + 10 * n + cameras, d.images.shape).copy())
        for n, d in enumerate([demonstration(0, 5), demonstration(1, 7)])
    ]
    write(tmp_path, smooth, video=True)
    demos = load_demonstrations(tmp_path)
    error = np.abs(demos.images.astype(int) - np.concatenate([d.images for d in smooth]).astype(int))
    assert error.mean() < 4
    np.testing.assert_array_equal(demos.action, np.concatenate([d.action for d in smooth]))


def test_videos_of_odd_size_round_trip(tmp_path: Path) -> None:
    """H.264 with halved color planes has no odd height or width."""
    spec = replace(card(video=True), env=replace(ENV, cameras=replace(ENV.cameras, size=(15, 23))))
    writer = DatasetWriter(tmp_path, spec)
    d = demonstration(0, 5)
    writer.append(replace(d, images=np.full((5, 2, 15, 23, 3), 100, np.uint8)))
    writer.flush()
    writer.close()
    assert check_layout(tmp_path) == []
    assert np.abs(load_demonstrations(tmp_path).images.astype(int) - 100).max() <= 3
    info = json.loads((tmp_path / "meta/info.json").read_text())["features"]["observation.images.front"]["info"]
    assert (info["video.height"], info["video.width"], info["video.pix_fmt"]) == (15, 23, "yuv444p")


def test_one_dimensional_and_missing_states_round_trip(tmp_path: Path) -> None:
    for width in (0, 1):
        root = tmp_path / str(width)
        writer = DatasetWriter(root, replace(card(), env=replace(ENV, state_dim=width)))
        d = demonstration(0)
        writer.append(replace(d, state=d.state[:, :width]))
        writer.flush()
        writer.close()
        assert check_layout(root) == []
        np.testing.assert_array_equal(load_demonstrations(root).state, d.state[:, :width])


def test_action_chunks_are_padded_with_the_last_action(tmp_path: Path) -> None:
    write(tmp_path, [demonstration(0, 4), demonstration(1, 3)])
    demos = load_demonstrations(tmp_path)
    chunks = demos.chunks(np.array([0, 2, 3, 4, 6]), 3)
    picked = [[0, 1, 2], [2, 3, 3], [3, 3, 3], [4, 5, 6], [6, 6, 6]]
    np.testing.assert_array_equal(chunks, demos.action[np.array(picked)])


def test_crash_during_writing_loses_only_the_last_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies at each file of the second batch: complete batches stay readable and can be extended."""
    write_file = writer_module.layout.write_file
    first, second = [demonstration(n) for n in (0, 2, 4)], [demonstration(n) for n in (3, 5)]  # of another task
    expected = np.concatenate([d.action for d in first + second])
    for last in range(6):
        root = tmp_path / str(last)
        write(root, first)
        writer = DatasetWriter(root, card())
        for d in second:
            writer.append(d)
        done = [0]

        def dying(path: Path, content: bytes, last: int = last, done: list[int] = done) -> None:
            if done[0] == last:
                path.with_name(f".tmp-1-{path.name}").write_bytes(content[: len(content) // 2])
                raise KeyboardInterrupt
            done[0] += 1
            write_file(path, content)

        with monkeypatch.context() as patch:
            patch.setattr(writer_module.layout, "write_file", dying)
            if last < 5:
                with pytest.raises(KeyboardInterrupt):
                    writer.flush()
            else:
                writer.flush()
        writer.close()
        again = DatasetWriter(root, card())
        assert check_layout(root) == []
        kept = len(again.episodes)
        assert kept == (3 if last < 2 else 5)
        assert not list(root.rglob(".tmp-*"))
        for d in (first + second)[kept:]:
            again.append(d)
        again.flush()
        again.close()
        assert check_layout(root) == []
        np.testing.assert_array_equal(load_demonstrations(root).action, expected)


def test_writer_continues_after_a_kill_before_its_first_file(tmp_path: Path) -> None:
    (tmp_path / "set" / "meta").mkdir(parents=True)
    (tmp_path / "set" / "meta" / ".tmp-1-embodyrl.json").write_text("{")
    write(tmp_path / "set", [demonstration(0)])
    assert check_layout(tmp_path / "set") == []
    assert not list((tmp_path / "set").rglob(".tmp-*"))


def test_folder_with_other_contents_or_settings_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(EmbodyError, match="not empty and contains no data set"):
        DatasetWriter(tmp_path / "other", card())
    write(tmp_path / "mine", [demonstration(0)])
    with pytest.raises(EmbodyError, match=r"collected.seed is None in the data set, but 3"):
        DatasetWriter(tmp_path / "mine", card(seed=3))
    with pytest.raises(EmbodyError, match=r"video is False in the data set"):
        DatasetWriter(tmp_path / "mine", card(video=True))
    DatasetWriter(tmp_path / "seeded", card(seed=3)).close()
    with pytest.raises(EmbodyError, match=r"collected.seed is 3 in the data set, but None"):
        DatasetWriter(tmp_path / "seeded", card())


def test_error_names_the_damaged_or_missing_dataset(tmp_path: Path) -> None:
    with pytest.raises(EmbodyError, match=r"is not a folder.*embodyrl collect"):
        load_demonstrations(tmp_path / "nowhere")
    write(tmp_path / "d", [demonstration(0)])
    (tmp_path / "d/data/chunk-000/file-000.parquet").unlink()
    with pytest.raises(EmbodyError, match=r"is damaged: .*file-000.parquet of episode 0 is missing"):
        load_demonstrations(tmp_path / "d")


def test_episode_row_contains_success_and_return(tmp_path: Path) -> None:
    """The episode succeeds in the middle and has rewards before and after."""
    success, reward = np.zeros(6, np.bool_), np.array([0, 0.5, 1, 0, -0.25, 0], np.float32)
    success[2] = True
    write(tmp_path, [replace(demonstration(1), success=success, reward=reward)])
    (row,) = read_episodes(tmp_path)
    assert (row["embodyrl/success"], row["embodyrl/return"]) == (True, 1.25)


def test_joined_datasets_keep_each_episode_unchanged(tmp_path: Path) -> None:
    for name, numbers in (("a", (0, 1)), ("b", (1, 2, 3))):
        write(tmp_path / name, [demonstration(n, 3 + n) for n in numbers])
    parts = [load_demonstrations(tmp_path / name) for name in ("a", "b")]
    both = join_demonstrations(parts)
    assert both.reset_id.tolist() == [0, 5, 5, 0, 5]
    assert (both.start.tolist(), both.stop.tolist()) == ([0, 3, 7, 11, 16], [3, 7, 11, 16, 22])
    for name in ("images", "state", "action", "reward", "success", "instruction"):
        np.testing.assert_array_equal(getattr(both, name), np.concatenate([getattr(part, name) for part in parts]))


def test_preference_pairs_share_an_initial_state(tmp_path: Path) -> None:
    """Success decides before return; equal episodes and different or unknown initial states are no pairs."""
    lengths, earned = (5, 4, 3, 5, 4, 4), (0.0, 3.0, 0.0, 1.0, 0.0, 2.0)
    won, states = (True, False, False, False, False, False), (0, 0, 0, 5, -1, -1)
    parts = [demonstration(n, length) for n, length in enumerate(lengths)]
    for n, part in enumerate(parts):
        part.success[:], part.reward[:] = False, 0
        part.success[1], part.reward[0] = won[n], earned[n]
    write(tmp_path, parts)
    demos = load_demonstrations(tmp_path)
    demos.reset_id[:] = states
    assert demos.get_ranked_pairs(range(6), 2).tolist() == [[0, 5], [2, 7], [0, 9], [2, 11], [5, 9], [7, 11]]
    assert demos.get_ranked_pairs([0, 3], 2).tolist() == []
    assert np.flatnonzero(demos.is_solved).tolist() == [2]
    demos.success[4] = True
    assert np.flatnonzero(demos.is_solved).tolist() == [2], "the next episode begins without it"


def test_statistics_cover_all_written_frames(tmp_path: Path) -> None:
    write(tmp_path / "once", [demonstration(n) for n in range(4)])
    for numbers in (range(2), range(2, 4)):
        write(tmp_path / "twice", [demonstration(n) for n in numbers])
    once, twice = (flatten(json.loads((tmp_path / name / "meta/stats.json").read_text())) for name in ("once", "twice"))
    assert once.keys() == twice.keys()
    assert all(np.allclose(once[key], twice[key]) for key in once)
    ramp = compute_vector_stats(np.arange(101))
    assert {name: float(ramp[name][0]) for name in QUANTILES} == {"q01": 1, "q10": 10, "q50": 50, "q90": 90, "q99": 99}
    two = np.array([0, 200], np.uint8).reshape(2, 1, 1, 1).repeat(3, axis=3)
    assert compute_image_stats(count_pixels(two), 2)["q50"].ravel().tolist() == pytest.approx([100 / 255] * 3)


def test_image_statistics_cover_every_pixel_of_every_frame(tmp_path: Path) -> None:
    parts = [demonstration(n, length) for n, length in enumerate((40, 3, 121))]
    rng = np.random.default_rng(0)
    for part in parts:
        part.images[:] = rng.integers(0, 256, part.images.shape) ** 2 // 256
    write(tmp_path, parts[:2])
    write(tmp_path, parts[2:])
    found = json.loads((tmp_path / "meta/stats.json").read_text())
    for c, camera in enumerate(ENV.cameras.names):
        stats = found[f"observation.images.{camera}"]
        pixels = np.concatenate([part.images[:, c] for part in parts]).reshape(-1, 3) / 255.0
        assert stats["count"] == [164]
        assert np.ravel(stats["mean"]) == pytest.approx(pixels.mean(axis=0))
        assert np.ravel(stats["std"]) == pytest.approx(pixels.std(axis=0))
        for name, q in QUANTILES.items():
            assert np.ravel(stats[name]) == pytest.approx(np.quantile(pixels, q, axis=0))
    for row, part in zip(read_episodes(tmp_path), parts, strict=True):
        assert row[f"stats/observation.images.{camera}/count"] == [len(part)]


def test_sampled_image_statistics_of_an_older_version_are_not_extended(tmp_path: Path) -> None:
    write(tmp_path, [demonstration(0, 20)])
    column = f"embodyrl/pixels/observation.images.{ENV.cameras.names[0]}"
    path = next((tmp_path / "meta/episodes").rglob("*.parquet"))
    rows = pq.read_table(path).to_pylist()
    rows[0][column] = [count // 2 for count in rows[0][column]]
    pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(EmbodyError, match="older version, whose image statistics cannot be extended"):
        write(tmp_path, [demonstration(1, 20)])


def test_constant_values_in_an_episode_do_not_narrow_quantiles(tmp_path: Path) -> None:
    """A gripper that is closed in one episode and open in the next has both values as quantiles."""
    for n in range(4):
        d = demonstration(n, 5)
        d.action[:, 6] = n % 2
        write(tmp_path, [d])
    stats = json.loads((tmp_path / "meta/stats.json").read_text())["action"]
    assert (stats["q01"][6], stats["q99"][6]) == (0, 1)


@pytest.mark.parametrize("field", ["state", "action", "reward"])
def test_non_finite_values_are_never_written(tmp_path: Path, field: str) -> None:
    bad = demonstration(0)
    getattr(bad, field)[2] = np.nan
    with pytest.raises(EmbodyError, match=r"of step 2 of 'sweep the floor' \(reset id 0\) is"):
        write(tmp_path, [demonstration(1), bad])


def test_frames_are_limited_to_80_percent_of_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [demonstration(0, 4)])
    needed = demonstration(0, 4).images.nbytes
    monkeypatch.setattr(reader, "available_bytes", lambda: needed / 0.8 + 1)
    assert len(load_demonstrations(tmp_path).images) == 4
    monkeypatch.setattr(reader, "available_bytes", lambda: needed / 0.8 - 1)
    with pytest.raises(EmbodyError, match="decoded frames need"):
        load_demonstrations(tmp_path)


def test_dataset_cards_of_the_first_release_are_read():
    """Their environment has all fields of that release's spec, including memory estimates."""
    text = json.dumps(json.loads(card().to_json()) | {"collected": {}})
    raw = json.loads(text)
    raw["env"] |= {"task_bytes": 5, "gpu_bytes": [0, 0], "expert_tasks": [0], "desired_goal": [0, 0], "lockstep": False}
    old = Card.from_json(json.dumps(raw))
    assert old.env == Card.from_json(text).env
    assert (old.env.action, old.env.cameras, old.env.tasks) == (ENV.action, ENV.cameras, ENV.tasks)
    del raw["env"]["action_space"]
    assert Card.from_json(json.dumps(raw)).env.action.bounds[0] == (-1.0,) * ENV.action.dim


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("env.cameras.1", ["a"]),
        ("env.cameras.1", None),
        ("env.state_dim", []),
        ("env.gripper.open", None),
        ("env.gripper.index", {}),
        ("env.image_size.0", 1e308),
        ("env.action_dim", ["a"]),
        ("env.action_dim", {}),
        ("collected", -1),
        ("fps", "fast"),
    ],
)
def test_value_of_another_type_in_the_card_is_an_error(key: str, value: object, tmp_path: Path) -> None:
    write(tmp_path, [demonstration(0)])
    path = tmp_path / "meta/embodyrl.json"
    raw = json.loads(path.read_text())
    *parents, last = [int(part) if part.isdecimal() else part for part in key.split(".")]
    node = raw
    for part in parents:
        node = node[part]
    node[last] = value
    path.write_text(json.dumps(raw))
    with pytest.raises(EmbodyError, match=r"embodyrl.json cannot be read .*Download or collect the data set again"):
        read_card(tmp_path)
