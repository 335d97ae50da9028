"""LeRobot datasets in both directions, with files written by lerobot 0.4.4 (lerobot_files/write.py), v2.1 by 0.3.3."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from demos import demonstration
from test_dataset_roundtrip import write

from embodyrl.data.cards import read_card
from embodyrl.data.checks import check_layout
from embodyrl.data.reader import load_demonstrations
from embodyrl.errors import EmbodyError

FILES = Path(__file__).parent / "lerobot_files"
LENGTHS = (5, 7, 4)


@pytest.mark.parametrize(("kind", "error"), [("image", 0.0), ("video", 2.0), ("image_v21", 0.0), ("video_v21", 2.0)])
def test_datasets_written_by_lerobot_are_read(kind: str, error: float) -> None:
    assert check_layout(FILES / kind) == []
    demos, card = load_demonstrations(FILES / kind), read_card(FILES / kind)
    assert (card.fps, card.video, card.env.name) == (10, kind.startswith("video"), "so100")
    assert card.env.cameras.names == ("top", "wrist")
    assert card.env.tasks == ("pick the cube", "open the lid")
    numbers = np.random.default_rng(0).normal(size=(16, 2, 6)).astype(np.float32)
    np.testing.assert_array_equal(demos.state, numbers[:, 0])
    np.testing.assert_array_equal(demos.action, numbers[:, 1])
    assert (demos.stop - demos.start).tolist() == list(LENGTHS)
    assert demos.instruction.tolist() == ["pick the cube"] * 5 + ["open the lid"] * 7 + ["pick the cube"] * 4
    frames = np.zeros((16, 64, 96, 3), np.uint8)
    frames[..., 0] = np.concatenate([10 * np.arange(length) for length in LENGTHS])[:, None, None]
    frames[..., 1] = 40 * np.repeat(np.arange(3), LENGTHS)[:, None, None]
    frames[:, :, :48, 2] = 200
    for camera, expected in enumerate((frames, 255 - frames)):
        assert np.abs(demos.images[:, camera].astype(int) - expected).mean() <= error


def test_unsupported_lerobot_datasets_are_rejected(tmp_path: Path) -> None:
    shutil.copytree(FILES / "image", tmp_path / "old")
    info = json.loads((tmp_path / "old" / "meta" / "info.json").read_text())
    for change, said in (
        ({"codebase_version": "v1.6"}, "has LeRobot's layout v1.6"),
        ({"codebase_version": "v2.0"}, "has LeRobot's layout v2.0, .* Convert it to v2.1 .*convert_dataset_v20_to_v21"),
        (
            {"features": {**info["features"], "observation.image": {"dtype": "image", "shape": [8, 8, 3]}}},
            "data.cameras",
        ),
    ):
        (tmp_path / "old" / "meta" / "info.json").write_text(json.dumps({**info, **change}))
        with pytest.raises(EmbodyError, match=said):
            load_demonstrations(tmp_path / "old")


def test_lerobot_reads_collected_datasets(tmp_path: Path) -> None:
    """Runs only if LeRobot is installed, because it needs other versions of torch."""
    lerobot = pytest.importorskip("lerobot.datasets.lerobot_dataset")
    written = [demonstration(n) for n in range(5)]
    write(tmp_path / "ours", written)
    wanted = {"action": [i / 20 for i in range(3)]}
    theirs = lerobot.LeRobotDataset("me/x", root=tmp_path / "ours", delta_timestamps=wanted)
    ours = load_demonstrations(tmp_path / "ours")
    assert (len(theirs), theirs.num_episodes, theirs.fps) == (30, 5, 20)
    chunks = ours.chunks(np.arange(30), 3)
    for step in range(30):
        item = theirs[step]
        np.testing.assert_array_equal(item["action"].numpy(), chunks[step])
        np.testing.assert_array_equal(item["observation.state"].numpy(), ours.state[step])
        front = (item["observation.images.front"].numpy() * 255).round().astype(np.uint8)
        np.testing.assert_array_equal(front.transpose(1, 2, 0), ours.images[step, 0])
        assert item["task"] == ours.instruction[step]
