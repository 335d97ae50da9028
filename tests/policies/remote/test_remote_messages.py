"""Observation messages round-trip, and damaged or malicious messages are rejected."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from embodyrl.policies.inputs import rotate_upright
from embodyrl.policies.remote.settings import WireFormatSettings
from embodyrl.policies.remote.wire_formats import (
    OPENPI,
    VLA_EVAL,
    MessageError,
    RemoteObservation,
    encode_openpi_array,
    encode_vla_eval_array,
    get_field_names,
    pack,
    unpack,
)

msgpack = pytest.importorskip("msgpack", reason="the extra `serve` is not installed")
PICTURE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


@pytest.mark.parametrize("write", [encode_openpi_array, encode_vla_eval_array])
def test_arrays_round_trip(write):
    sent = {"a": PICTURE[::-1], "b": [np.float32(1.5), np.zeros((0, 3))], "c": {"d": np.array([True, False])}}
    found = unpack(pack(sent, write))
    for one, other in ((found["a"], sent["a"]), (found["b"][1], sent["b"][1]), (found["c"]["d"], sent["c"]["d"])):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    assert found["b"][0] == 1.5


def test_compressed_images_are_decoded():
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(PICTURE).save(buffer, "PNG")
    raw = {"__image__": True, "format": "raw", "data": PICTURE.tobytes(), "dtype": "|u1", "shape": [4, 5, 3]}
    png = {"__image__": True, "format": "png", "data": buffer.getvalue(), "shape": [4, 5, 3]}
    for found in unpack(msgpack.packb([raw, png])):
        assert np.array_equal(found, PICTURE)


def _png(width: int, height: int) -> dict[str, object]:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG")
    return {"__image__": True, "format": "png", "data": buffer.getvalue()}


def _png_header(width: int, height: int) -> dict[str, object]:
    """Return an RGBA image without content, whose size is read before the content."""
    chunks = (b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0), b"IDAT")
    data = b"".join(struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    return {"__image__": True, "format": "png", "data": b"\x89PNG\r\n\x1a\n" + data}


@pytest.mark.parametrize(
    "message",
    [
        lambda: b"\xdd" + (1 << 20).to_bytes(4, "big") + b"\x90" * (1 << 20),
        lambda: msgpack.packb([[[]] * 1000] * 1000),
        lambda: msgpack.packb([{str(number): 0 for number in range(1000)}] * 1000),
        lambda: msgpack.packb([[0] * 10_000] * 10),
        lambda: msgpack.packb({"prompt": "x" * (1 << 17)}),
        lambda: msgpack.packb([_png_header(4500, 4000)]),
        lambda: b"\x91" * 100_000,
    ],
    ids=["long", "nested", "maps", "numbers", "text", "pictures", "deep"],
)
def test_small_messages_with_many_parts_are_rejected(message):
    with pytest.raises(MessageError, match=r"more than|not msgpack"):
        unpack(message())


def test_long_states_and_many_images_are_read():
    found = unpack(msgpack.packb({"state": [0.5] * 5000, "images": [_png(640, 480)] * 8, "prompt": "x" * 5000}))
    assert len(found["state"]) == 5000
    assert found["images"][7].shape == (480, 640)


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("dtype", "|O", "only booleans"),
        ("dtype", "<U3", "only booleans"),
        ("dtype", "nonsense", "unknown type"),
        ("shape", [4, 5, 4], "data of the wrong size"),
        ("shape", [-4, -15], "data of the wrong size"),
        *(("shape", shape, "unknown shape") for shape in (["x"], [60.0], ["60"], {"0": 60}, None, [1] * 33)),
        ("shape", [1e308] * 16_000, "unknown shape"),
        ("shape", [2**63] * 16_000, "unknown shape"),
        ("data", b"", "data of the wrong size"),
        ("data", 3, "data of the wrong size"),
        ("data", None, "data of the wrong size"),
    ],
)
def test_damaged_or_malicious_array_is_rejected(field, value, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = encode_vla_eval_array(PICTURE)
    data = pickle.dumps(Bomb()) if value == "|O" else whole["data"]
    with pytest.raises(MessageError, match=says):
        unpack(msgpack.packb(whole | {"data": data} | {field: value}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data", [b"\xc1", b"\x93\x01", b"", "text", b"\x91" * 10_000])
def test_malformed_message_is_rejected(data):
    with pytest.raises(MessageError):
        unpack(data)


def test_image_of_another_type_is_rejected():
    with pytest.raises(MessageError, match="neither PNG nor JPEG"):
        unpack(msgpack.packb({"__image__": True, "format": "png", "data": b"GIF89a", "shape": [1, 1, 3]}))


def test_unsupported_objects_are_not_pickled():
    with pytest.raises(MessageError, match="cannot be sent"):
        pack({"a": np.array([object()])}, encode_openpi_array)
    with pytest.raises(MessageError, match="cannot be sent"):
        pack({"a": Bomb()}, encode_openpi_array)


SEEN = RemoteObservation(
    images=(PICTURE, PICTURE[:, ::-1]), state=np.arange(8, dtype=np.float32), prompt="pick up the bowl"
)


def test_default_field_names_match_openpi_libero_policies():
    assert set(OPENPI.write(SEEN)) == {"observation/image", "observation/wrist_image", "observation/state", "prompt"}
    assert set(VLA_EVAL.write(SEEN)) == {"images", "states", "task_description"}


@pytest.mark.parametrize("names", [OPENPI, VLA_EVAL])
def test_observations_round_trip(names):
    found = names.read(names.write(SEEN), images=2, states=8)
    assert all(np.array_equal(one, other) for one, other in zip(found.images, SEEN.images, strict=True))
    assert np.array_equal(found.state, SEEN.state)
    assert found.prompt == SEEN.prompt


def test_vla_eval_images_are_read_by_position():
    """vla-eval's servers read images by position; fails if names decide."""
    first, second = SEEN.images
    message = VLA_EVAL.write(SEEN) | {"images": {"wrist": first, "agentview": second}}
    found = VLA_EVAL.read(unpack(pack(message, encode_vla_eval_array)), images=2, states=8)
    assert np.array_equal(found.images[0], first)
    assert np.array_equal(found.images[1], second)
    assert np.array_equal(VLA_EVAL.read(message, images=1, states=8).images[0], first)


def test_message_field_names_are_configurable():
    cfg = WireFormatSettings(image_names=["cam_high"], state_name="state", prompt_name="task")
    message = get_field_names(cfg).write(SEEN)
    assert set(message) == {"cam_high", "state", "task"}
    vla = get_field_names(cfg.updated({"protocol": "vla_eval"}))
    shuffled = {"images": {"other": PICTURE[:2], "cam_high": PICTURE}, "state": SEEN.state, "task": "x"}
    assert np.array_equal(vla.read(shuffled, images=1, states=8).images[0], PICTURE)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"observation/image": PICTURE.astype(np.float32)}, "uint8"),
        ({"observation/image": PICTURE[0]}, "uint8"),
        ({"observation/image": PICTURE[:2]}, "differ in size"),
        ({"observation/image": "red"}, "uint8"),
        ({"observation/state": np.zeros(7)}, "8 finite numbers"),
        ({"observation/state": [float("nan")] * 8}, "8 finite numbers"),
        ({"prompt": None}, "must be a string"),
    ],
)
def test_mismatched_observation_is_rejected(change, says):
    with pytest.raises(MessageError, match=says):
        OPENPI.read(OPENPI.write(SEEN) | change, images=2, states=8)


def test_missing_field_error_lists_received_fields():
    message = OPENPI.write(SEEN)
    del message["observation/wrist_image"]
    with pytest.raises(MessageError, match=r"'observation/wrist_image'.*Received: .*'observation/image'.*Fix"):
        OPENPI.read(message, images=2, states=8)
    assert OPENPI.read(message, images=1, states=0).state is None


def test_rotating_images_twice_gives_the_original():
    turned = rotate_upright(PICTURE, 180)
    assert np.array_equal(turned, PICTURE[::-1, ::-1])
    assert np.array_equal(rotate_upright(turned, 180), PICTURE)
    assert rotate_upright(PICTURE, 0) is PICTURE
