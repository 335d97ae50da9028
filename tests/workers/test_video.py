import imageio.v3 as iio
import numpy as np
import pytest

from embodyrl.workers.recording.video import VideoError, VideoRecorder

LONG = "put both the alphabet soup and the tomato sauce in the basket and then close the microwave door gently"


def gray(value, size=(128, 160)):
    return np.full((*size, 3), value, np.uint8)


def record(stem, values, *, info, instruction="do it", success_from=None):
    video = VideoRecorder(stem, 20, instruction, info)
    for step, value in enumerate(values, start=1):
        video.add(gray(value), success_from is not None and step >= success_from)
    return video


def test_video_file_name_contains_outcome_and_steps(tmp_path):
    stem = tmp_path / "new" / "task0.ep3"
    path = record(stem, [40, 120, 200, 120, 40], info=True, success_from=4).finish()
    assert path == tmp_path / "new" / "task0.ep3_success_5steps.mp4"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    frames = iio.imread(path)
    assert frames.shape[0] == 5 + 20, "a second of still image follows"
    assert frames.shape[2] == 160, "the frames are not enlarged"
    assert frames.shape[1] > frames.shape[2] * 128 / 160, "text bands enlarge the image"
    meta = iio.immeta(path)
    assert (meta["codec"], meta["fps"]) == ("h264", 20.0)
    assert meta["pix_fmt"].startswith("yuv420p")
    middle = frames[:, frames.shape[1] // 2, 80].mean(axis=1)
    np.testing.assert_allclose(middle, [40, 120, 200, 120, 40] + [40] * 20, atol=6)


def test_video_text_is_outside_the_image(tmp_path):
    frames = iio.imread(record(tmp_path / "a", [90, 90], info=True, instruction=LONG, success_from=2).finish())
    bands = frames[:, -20:]
    assert (frames[0, :20].max(axis=2) > 180).any(), "the instruction is drawn above"
    assert (bands[0].max(axis=2) > 180).any(), "the step is drawn below"
    right = bands[:, :, 80:].astype(int)
    green = (right[..., 1] - right[..., 0] > 40).any(axis=(1, 2))
    assert green.tolist() == [False] + [True] * 21


@pytest.mark.parametrize(("judged", "success_from", "color"), [(True, 2, 1), (True, None, 0), (False, None, None)])
def test_video_ends_with_a_colored_outcome_frame(tmp_path, judged, success_from, color):
    video = VideoRecorder(tmp_path / "end", 20, "do it", True, reports_success=judged)
    for step in (1, 2):
        video.add(gray(90), success_from == step)
    band = iio.imread(video.finish())[-1][-18:].mean(axis=(0, 1))
    strongest = int(band.argmax()) if band.max() - band.min() > 60 else None
    assert strongest == color


def test_band_below_the_image_shows_the_actor(tmp_path):
    video = VideoRecorder(tmp_path / "who", 20, "do it", True)
    for actor in ("policy", "person", "policy"):
        video.add(gray(90), False, actor=actor, highlighted=actor == "person")
    corners = iio.imread(video.finish())[:3, -6:-2, -6:-2].mean(axis=(1, 2))
    assert [bool(red > 200 and blue < 100) for red, _, blue in corners] == [False, True, False]


def test_short_episodes_play_at_a_constant_slower_rate(tmp_path):
    """The longest video has four steps and lasts four seconds, so each step lasts one second."""
    for name, steps in (("short", 2), ("long", 4)):
        video = VideoRecorder(tmp_path / name, 20, "do it", True, horizon=4)
        for _ in range(steps):
            video.add(gray(90), False)
        assert len(iio.imread(video.finish())) == 20 * steps + 20


def test_video_has_no_overlay_on_the_image(tmp_path):
    frames = iio.imread(record(tmp_path / "a", [90, 90], info=True, instruction=LONG, success_from=2).finish())
    top = frames.shape[1] - 128 - 23
    picture = frames[0, top + 2 : top + 126, 2:-2]
    assert np.abs(picture.astype(int) - 90).max() < 20, "nothing is drawn over the image"


def test_long_instructions_wrap_in_the_video_caption(tmp_path):
    short = iio.imread(record(tmp_path / "s", [1], info=True).finish())
    long = iio.imread(record(tmp_path / "l", [1], info=True, instruction=LONG).finish())
    plain = iio.imread(record(tmp_path / "p", [1], info=False, instruction=LONG).finish())
    assert long.shape[1] > short.shape[1] > plain.shape[1]
    assert plain.shape[1:3] == (128, 160)


def test_pixels_of_small_frames_are_repeated(tmp_path):
    """For 64 x 48 pixels, threefold, so that the text fits; edges stay sharp."""
    frame = gray(40, (48, 64))
    frame[:, 32:] = 200
    video = VideoRecorder(tmp_path / "small", 20, "do it", False)
    video.add(frame, False)
    row = iio.imread(video.finish())[0][70, :, 0].astype(int)
    assert len(row) == 192
    np.testing.assert_allclose(row, np.repeat([40, 200], 96), atol=8)


def test_odd_frame_sizes_are_padded_to_even(tmp_path):
    video = VideoRecorder(tmp_path / "odd", 10, "x", False)
    video.add(gray(7, (301, 513)), False)
    assert iio.imread(video.finish()).shape[1:3] == (302, 514)


def test_discarded_video_leaves_no_file(tmp_path):
    video = record(tmp_path / "gone", [1, 2, 3], info=True)
    video.discard()
    video.discard()
    assert list(tmp_path.iterdir()) == []


def test_video_errors_name_and_remove_the_file(tmp_path):
    video = record(tmp_path / "bad", [1], info=True)
    with pytest.raises(VideoError, match=r"bad\.partial\.mp4.*shape \(5, 6, 3\), the first one had \(128, 160, 3\)"):
        video.add(gray(0, (5, 6)), False)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(VideoError, match=r"float64 \(4, 4, 3\), but must be uint8"):
        VideoRecorder(tmp_path / "f", 10, "x", True).add(np.zeros((4, 4, 3)), False)
    with pytest.raises(VideoError, match="no frame was added"):
        VideoRecorder(tmp_path / "empty", 10, "x", True).finish()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(VideoError, match=r"file/x\.partial\.mp4"):
        record(tmp_path / "file" / "x", [1], info=True)


def test_unusable_target_is_an_error_without_files(tmp_path):
    target = tmp_path / "taken_success_1steps.mp4"
    target.mkdir()
    with pytest.raises(VideoError, match=r"taken\.partial\.mp4"):
        record(tmp_path / "taken", [1], info=True, success_from=1).finish()
    assert list(tmp_path.iterdir()) == [target]


def test_video_file_name_of_a_failed_episode_contains_fail(tmp_path):
    assert record(tmp_path / "ep", [40, 120], info=False).finish().name == "ep_fail_2steps.mp4"
