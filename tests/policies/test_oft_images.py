import io

import numpy as np
import pytest
import torch
from PIL import Image

from embodyrl.policies.openvla_oft.config import read_config
from embodyrl.policies.openvla_oft.images import (
    centre_crop,
    jpeg_round_trip,
    lanczos_resize,
    official_pixels,
    preprocess,
    rlinf_pixels,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tf_images(golden_dir):
    return dict(np.load(golden_dir / "expected" / "image_pipeline_tf.npz"))


@pytest.fixture(scope="module")
def norms(golden_dir):
    return read_config(golden_dir / "tiny_oft").pixel_norms


def planes(image):
    return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None].float()


def levels(tensor):
    return tensor[0].permute(1, 2, 0).numpy()


def test_rlinf_resize_equals_torchvision(tf_images, golden_dir):
    want = np.load(golden_dir / "expected" / "image_pipeline_rlinf.npz")["bicubic_224_float_path"]
    upright = np.ascontiguousarray(tf_images["agentview_256"][::-1, ::-1])
    assert np.array_equal(levels(rlinf_pixels(upright[None], 224, CPU)), want)


def test_jpeg_encoder_equals_tensorflow(tf_images):
    """Same coefficients; only the decoders' rounding differs."""
    upright = np.ascontiguousarray(tf_images["agentview_256"][::-1, ::-1])
    want = np.asarray(Image.open(io.BytesIO(tf_images["jpeg_bytes"].tobytes())).convert("RGB"))
    assert np.array_equal(jpeg_round_trip(upright), want)
    difference = np.abs(want.astype(int) - tf_images["jpeg_decoded_256"])
    assert difference.max() <= 13


def test_lanczos_equals_tensorflow(tf_images):
    got = levels(lanczos_resize(planes(tf_images["jpeg_decoded_256"]), 224))
    difference = np.abs(got - tf_images["lanczos_224"])
    assert difference.max() <= 1
    assert (difference > 0).mean() <= 2e-5


def test_centre_crop_equals_tensorflow(tf_images):
    got = levels(centre_crop(planes(tf_images["lanczos_224"])))
    assert np.array_equal(got, tf_images["center_crop_224"])


def test_whole_official_pipeline_stays_within_the_decoders_difference(tf_images):
    upright = np.ascontiguousarray(tf_images["agentview_256"][::-1, ::-1])
    got = levels(official_pixels(upright[None], 224, CPU))
    difference = np.abs(got - tf_images["center_crop_224"])
    assert difference.max() <= 13
    assert difference.mean() < 1.2


def test_normalisation_and_channel_order(tf_images, norms, golden_dir):
    want = np.load(golden_dir / "expected" / "image_pipeline_pixel_values.npz")
    frames = tf_images["center_crop_224"][None, None]
    got = preprocess(frames, rotation_deg=0, pipeline="rlinf", size=224, norms=norms, device=CPU)
    assert got.shape == (1, 6, 224, 224)
    np.testing.assert_allclose(got[0, :, ::16, ::16].numpy(), want["sub"], atol=1e-6)
    np.testing.assert_allclose(got[0].mean((1, 2)).numpy(), want["mean"], atol=1e-5)
    np.testing.assert_allclose(got[0].std((1, 2), correction=0).numpy(), want["std"], atol=1e-4)


@pytest.mark.parametrize("pipeline", ["rlinf", "official"])
def test_rotation_happens_before_everything_else(tf_images, norms, pipeline):
    raw = tf_images["agentview_256"][None, None]
    arguments = {"pipeline": pipeline, "size": 56, "norms": norms, "device": CPU}
    rotated = preprocess(raw, rotation_deg=180, **arguments)
    assert torch.equal(rotated, preprocess(raw[:, :, ::-1, ::-1], rotation_deg=0, **arguments))
    assert not torch.equal(rotated, preprocess(raw, rotation_deg=0, **arguments))


def test_cameras_are_groups_of_six_channels_and_rows_do_not_mix(norms):
    frames = np.random.default_rng(0).integers(0, 256, (3, 2, 40, 48, 3), dtype=np.uint8)
    arguments = {"rotation_deg": 180, "pipeline": "rlinf", "size": 28, "norms": norms, "device": CPU}
    both = preprocess(frames, **arguments)
    assert both.shape == (3, 12, 28, 28)
    assert torch.equal(both[:, 6:], preprocess(frames[:, 1:], **arguments))
    assert torch.equal(both[1:2], preprocess(frames[1:2], **arguments))


def test_constants_of_the_file_win_over_the_nominal_ones(norms):
    assert norms[0].mean == (0.484375, 0.455078125, 0.40625)
    assert norms[0].std == (0.228515625, 0.2236328125, 0.224609375)
