import numpy as np
import pytest
import simplejpeg
import torch

from embodyrl.policies.openvla_oft.config import read_config
from embodyrl.policies.openvla_oft.inputs import (
    apply_jpeg,
    center_crop,
    preprocess,
    resize,
    resize_as_official,
    resize_as_rlinf,
    resize_lanczos,
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


def test_rlinf_resize_matches_torchvision(tf_images, golden_dir):
    want = np.load(golden_dir / "expected" / "image_pipeline_rlinf.npz")
    upright = np.ascontiguousarray(tf_images["agentview_256"][::-1, ::-1])
    got = levels(resize_as_rlinf(upright[None], 224, CPU))
    for path in ("bicubic_224_float_path", "bicubic_224_uint8_cpu"):
        # A rounding on another processor may land on the other side.
        difference = np.abs(got - want[path])
        assert difference.max() <= 1
        assert (difference > 0).mean() <= 1e-4


@pytest.mark.parametrize("rotation_deg", [0, 180])
def test_resized_images_give_the_same_inputs_bit_for_bit(norms, rotation_deg):
    images = np.random.default_rng(0).integers(0, 256, (3, 2, 96, 80, 3), np.uint8)
    small = resize(images, rotation_deg=rotation_deg, size=56, device=CPU)
    assert (small.dtype, small.shape) == (np.uint8, (3, 2, 56, 56, 3))
    inputs, repeated = (
        preprocess(frames, rotation_deg=rotation_deg, pipeline="rlinf", size=56, norms=norms, device=CPU)
        for frames in (images, small)
    )
    assert torch.equal(inputs, repeated)
    assert not np.array_equal(small, resize(images, rotation_deg=180 - rotation_deg, size=56, device=CPU))


@pytest.fixture(scope="module")
def tf_frames(golden_dir):
    """Load real LIBERO images of three suites and two cameras, upright, with TensorFlow's results."""
    return dict(np.load(golden_dir / "expected" / "image_pipeline_tf_frames.npz"))


def test_jpeg_round_trip_matches_tensorflow(tf_images, tf_frames):
    upright = np.ascontiguousarray(tf_images["agentview_256"][::-1, ::-1])
    assert np.array_equal(apply_jpeg(upright), tf_images["jpeg_decoded_256"])
    decoded = simplejpeg.decode_jpeg(tf_images["jpeg_bytes"].tobytes(), fastdct=True)
    assert np.array_equal(decoded, tf_images["jpeg_decoded_256"])
    for frame, want in zip(tf_frames["frames"], tf_frames["decoded"], strict=True):
        assert np.array_equal(apply_jpeg(frame), want)


def test_lanczos_resize_matches_tensorflow(tf_images):
    got = levels(resize_lanczos(planes(tf_images["jpeg_decoded_256"]), 224))
    difference = np.abs(got - tf_images["lanczos_224"])
    assert difference.max() <= 1
    assert (difference > 0).mean() <= 2e-5


def test_center_crop_matches_tensorflow(tf_images):
    got = levels(center_crop(planes(tf_images["lanczos_224"])))
    assert np.array_equal(got, tf_images["center_crop_224"])


def test_official_image_pipeline_matches_tensorflow(tf_images, tf_frames):
    """Except for rounding in the resize, which depends on the processor."""
    upright = np.ascontiguousarray(tf_images["agentview_256"][::-1, ::-1])
    got = resize_as_official(np.concatenate([upright[None], tf_frames["frames"]]), 224, CPU).permute(0, 2, 3, 1).numpy()
    want = np.concatenate([tf_images["center_crop_224"][None], tf_frames["cropped"]])
    difference = np.abs(got - want)
    assert difference.max() <= 1
    assert (difference > 0).mean() <= 1e-4


def test_normalization_and_channel_order_match_reference(tf_images, norms, golden_dir):
    want = np.load(golden_dir / "expected" / "image_pipeline_pixel_values.npz")
    frames = tf_images["center_crop_224"][None, None]
    got = preprocess(frames, rotation_deg=0, pipeline="rlinf", size=224, norms=norms, device=CPU)
    assert got.shape == (1, 6, 224, 224)
    np.testing.assert_allclose(got[0, :, ::16, ::16].numpy(), want["sub"], atol=1e-6)
    np.testing.assert_allclose(got[0].mean((1, 2)).numpy(), want["mean"], atol=1e-5)
    np.testing.assert_allclose(got[0].std((1, 2), correction=0).numpy(), want["std"], atol=1e-4)


@pytest.mark.parametrize("pipeline", ["rlinf", "official"])
def test_image_rotation_is_applied_first(tf_images, norms, pipeline):
    raw = tf_images["agentview_256"][None, None]
    arguments = {"pipeline": pipeline, "size": 56, "norms": norms, "device": CPU}
    rotated = preprocess(raw, rotation_deg=180, **arguments)
    assert torch.equal(rotated, preprocess(raw[:, :, ::-1, ::-1], rotation_deg=0, **arguments))
    assert not torch.equal(rotated, preprocess(raw, rotation_deg=0, **arguments))


def test_each_camera_has_six_channels(norms):
    frames = np.random.default_rng(0).integers(0, 256, (3, 2, 40, 48, 3), dtype=np.uint8)
    arguments = {"rotation_deg": 180, "pipeline": "rlinf", "size": 28, "norms": norms, "device": CPU}
    both = preprocess(frames, **arguments)
    assert both.shape == (3, 12, 28, 28)
    assert torch.equal(both[:, 6:], preprocess(frames[:, 1:], **arguments))
    assert torch.equal(both[1:2], preprocess(frames[1:2], **arguments))


def test_processor_file_overrides_default_constants(norms):
    assert norms[0].mean == (0.484375, 0.455078125, 0.40625)
    assert norms[0].std == (0.228515625, 0.2236328125, 0.224609375)
