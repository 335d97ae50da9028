from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest
from PIL import Image

from embodyrl.reports.side_by_side import animate


def write(path: Path, frames: int, value: int, size: tuple[int, int] = (64, 96)) -> Path:
    with imageio.get_writer(path, fps=20, macro_block_size=2) as writer:
        for _ in range(frames):
            writer.append_data(np.full((*size, 3), value, np.uint8))
    return path


def read_frames(path: Path) -> list[np.ndarray]:
    with Image.open(path) as picture:
        frames = []
        for number in range(picture.n_frames):
            picture.seek(number)
            frames.append(np.asarray(picture.convert("L")))
    return frames


def test_shorter_video_holds_its_last_frame(tmp_path):
    before, after = write(tmp_path / "a.mp4", 12, 40), write(tmp_path / "b.mp4", 5, 200)
    out = tmp_path / "deep" / "joined.gif"
    animate([(before, after)], out, labels=("before", ""))
    frames = read_frames(out)
    assert frames[0].shape == (314, 640)
    for frame in (frames[0], frames[-1]):
        assert abs(int(np.median(frame[130:, :280])) - 40) < 12
        assert abs(int(np.median(frame[130:, 360:])) - 200) < 12
    assert frames[0][:90, :300].max() > 150 > 100 > frames[0][:90, 350:].max(), "the label is above the first recording"
    assert [p.name for p in out.parent.iterdir()] == ["joined.gif"]


def test_animated_image_shows_pairs_in_sequence(tmp_path):
    pairs = [(write(tmp_path / f"a{k}.mp4", 10, 40 + 40 * k), write(tmp_path / f"b{k}.mp4", 5, 200)) for k in range(2)]
    animate(pairs, tmp_path / "out.gif", labels=("before", "after"))
    with Image.open(tmp_path / "out.gif") as picture:
        assert picture.size[0] == 640
        shown, lasts = [], 0
        for frame in range(picture.n_frames):
            picture.seek(frame)
            lasts += picture.info["duration"]
            shown.append(int(np.median(np.asarray(picture.convert("L"))[200:, 100:200])))
    assert lasts == pytest.approx(2 * 5 * 125, abs=30), "milliseconds: every other frame of each, eight a second"
    assert abs(shown[0] - 40) < 12
    assert abs(shown[-1] - 80) < 12


PLAYLIST = (
    '<!--ftypjp2 --><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" mediaPresentationDuration="PT1S" '
    'profiles="urn:mpeg:dash:profile:isoff-main:2011"><Period><AdaptationSet mimeType="video/mp4">'
    '<Representation id="1" bandwidth="1" codecs="avc1"><BaseURL>{}</BaseURL></Representation></AdaptationSet>'
    "</Period></MPD>"
)


def test_playlists_that_name_other_videos_are_not_read(tmp_path):
    own, secret, playlist = write(tmp_path / "a.mp4", 3, 40), tmp_path / "secret.mp4", tmp_path / "b.mp4"
    fragments = ["-movflags", "frag_keyframe+empty_moov+default_base_moof"]
    with imageio.get_writer(secret, fps=20, macro_block_size=2, output_params=fragments) as writer:
        writer.append_data(np.full((64, 96, 3), 200, np.uint8))
    playlist.write_text(PLAYLIST.format(secret.as_uri()))
    with pytest.raises(OSError, match=r"b\.mp4 cannot be read as MP4"):
        animate([(own, playlist)], tmp_path / "out.gif", labels=("before", "after"))
    with pytest.raises(OSError, match=r"b\.mp4 cannot be read as MP4"):
        animate([(playlist, own)], tmp_path / "out.gif", labels=("before", "after"))
    assert not [*tmp_path.glob("out.*")]


def test_missing_recording_is_an_error_without_files(tmp_path):
    before = write(tmp_path / "a.mp4", 3, 40)
    with pytest.raises(OSError, match=r"missing\.mp4"):
        animate([(before, tmp_path / "missing.mp4")], tmp_path / "out.gif", labels=("a", "b"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.mp4"]
