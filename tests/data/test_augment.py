"""Image augmentation against its definition."""

from __future__ import annotations

import colorsys

import numpy as np
import torch

from embodyrl.data.augment import adjust_hue_and_saturation, augment, jitter, sample_random_numbers, shift

CPU = torch.device("cpu")


def test_hue_and_saturation_match_the_color_model() -> None:
    rng = np.random.default_rng(0)
    colors = np.vstack([rng.random((200, 3)), np.eye(3), 1 - np.eye(3), [[0.5, 0.5, 0.5], [0, 0, 0], [1, 1, 1]]])
    for factor, turn in ((1.0, 0.0), (0.8, 0.05), (1.2, -0.05), (1.2, 0.3)):
        expected = []
        for color in colors:
            h, s, v = colorsys.rgb_to_hsv(*color)
            expected.append(colorsys.hsv_to_rgb((h + turn) % 1.0, min(1.0, s * factor), v))
        pixels = torch.tensor(colors.T[None, :, None, :])
        found = adjust_hue_and_saturation(pixels, torch.tensor(factor), torch.tensor(turn))[0, :, 0].T
        np.testing.assert_allclose(found.numpy(), np.array(expected), atol=1e-6)


def test_random_shifts_stay_within_the_crop_margin() -> None:
    frames = torch.arange(100, dtype=torch.uint8)[None, :, None, None].expand(3, 100, 100, 3)
    # The crop keeps 0.9487 of each side, so its margin is 2.57 of 100 pixels: whole shifts of -2 to 2.
    moved = shift(frames, torch.tensor([0.0, 0.5, 0.999]), torch.tensor([0.5, 0.5, 0.5]))
    rows = [f[:, 0, 0].tolist() for f in moved]
    assert rows[0] == [0, 0, *range(98)]
    assert rows[1] == list(range(100))
    assert rows[2] == [*range(2, 100), 99, 99]


def test_neutral_jitter_does_not_change_pixels() -> None:
    pixels = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(jitter(pixels, torch.full((4, 2), 0.5)), pixels, atol=1e-6, rtol=0)


def test_brightness_and_contrast_follow_their_formulas() -> None:
    pixels = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(1)) * 0.4 + 0.3
    draws = torch.tensor([[1.0], [0.0], [0.5], [0.5]])
    brighter = pixels + 0.2
    mean = brighter.mean(dim=(2, 3), keepdim=True)
    torch.testing.assert_close(jitter(pixels, draws), ((brighter - mean) * 0.8 + mean).clamp(0, 1), atol=1e-6, rtol=0)


def test_augmentation_differs_by_frame_and_is_deterministic() -> None:
    frame = np.random.default_rng(0).integers(0, 256, (1, 1, 40, 40, 3), np.uint8)
    images = np.repeat(np.repeat(frame, 3, axis=0), 2, axis=1)
    one, two = (augment(images, sample_random_numbers(6, 7).unflatten(1, (3, 2)), CPU) for _ in range(2))
    assert (one.shape, one.dtype) == (images.shape, np.uint8)
    np.testing.assert_array_equal(one, two)
    flat = one.reshape(6, -1)
    assert len({row.tobytes() for row in flat}) == 6
    assert (augment(images, sample_random_numbers(6, 8).unflatten(1, (3, 2)), CPU) != one).any()
    assert images.base is None or (images[0, 0] == frame[0, 0]).all()


def test_hue_rotation_by_120_degrees_matches_colorsys() -> None:
    rng = np.random.default_rng(1)
    colors = rng.random((300, 3))
    for turn in (-1 / 3, 1 / 3):
        expected = [
            colorsys.hsv_to_rgb((h + turn) % 1.0, s, v) for h, s, v in (colorsys.rgb_to_hsv(*c) for c in colors)
        ]
        found = adjust_hue_and_saturation(
            torch.tensor(colors.T[None, :, None, :]), torch.tensor(1.0), torch.tensor(turn)
        )[0, :, 0].T
        np.testing.assert_allclose(found.numpy(), np.array(expected), atol=1e-6)


def test_row_and_column_shifts_are_sampled_independently() -> None:
    frames = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (2, 40, 60, 3), np.uint8))
    moved = shift(frames, torch.tensor([0.0, 0.999]), torch.tensor([0.999, 0.0]), 2)
    torch.testing.assert_close(moved[0, 2:, :-2], frames[0, :-2, 2:])
    torch.testing.assert_close(moved[1, :-2, 2:], frames[1, 2:, :-2])
