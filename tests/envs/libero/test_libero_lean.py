"""Reduced copies of meshes and textures, and their cache."""

import os
import subprocess
import sys

import numpy as np
import pytest

from embodyrl.envs.libero.lean import MAX_FACES, MAX_TEXTURE, reduce_visuals
from embodyrl.envs.meshes import cache_folder, decimate, read_mesh
from embodyrl.errors import EnvError

mujoco = pytest.importorskip("mujoco")
pytest.importorskip("meshoptimizer")


MODEL = """
<mujoco>
  <asset>
    <mesh name="seen" file="{folder}/ball.obj" scale="2 2 2"/>
    <mesh name="hit" file="{folder}/solid.obj"/>
    <texture name="wood" type="2d" file="{folder}/wood.png"/>
    <material name="wood" texture="wood"/>
  </asset>
  <worldbody>
    <body>
      <freejoint/>
      <geom type="mesh" mesh="seen" material="wood" group="1" contype="0" conaffinity="0" mass="0"/>
      <geom type="mesh" mesh="hit" group="0"/>
    </body>
  </worldbody>
</mujoco>
"""


def ball(rings, radius=1.0):
    """Return OBJ text of a sphere off the origin, with texture coordinates; up to 2 * rings * (2 * rings) triangles."""
    lines, around = [], 2 * rings
    for i in range(rings + 1):
        for j in range(around + 1):
            theta, phi = np.pi * i / rings, 2 * np.pi * j / around
            x, y, z = np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)
            lines += [f"v {radius * x + 3} {radius * y} {radius * z}", f"vt {j / around} {i / rings}"]
    for i in range(rings):
        for j in range(around):
            a, b = i * (around + 1) + j + 1, (i + 1) * (around + 1) + j + 1
            if i > 0:
                lines.append(f"f {a}/{a} {b}/{b} {a + 1}/{a + 1}")
            if i < rings - 1:
                lines.append(f"f {a + 1}/{a + 1} {b}/{b} {b + 1}/{b + 1}")
    return "\n".join(lines)


@pytest.fixture
def model(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "ball.obj").write_text(ball(60))
    (tmp_path / "solid.obj").write_text(ball(50, radius=0.5))
    Image.new("RGB", (1200, 600), (200, 100, 50)).save(tmp_path / "wood.png")
    return MODEL.format(folder=tmp_path)


def test_decimation_keeps_shape_normals_and_texture(tmp_path):
    path = tmp_path / "ball.obj"
    path.write_text(ball(60))
    full = read_mesh(path)
    small = decimate(full, 1000)
    assert len(full.faces) > 13000
    assert 500 < len(small.faces) <= 1000
    outward = small.position - [3, 0, 0]
    np.testing.assert_allclose(np.linalg.norm(outward, axis=1), 1, atol=1e-3)
    assert (np.einsum("pi,pi->p", small.normal, outward) > 0.99).all()
    u, v = small.texcoord.T
    poles = np.abs(outward[:, 2]) > 0.99
    angle = np.arctan2(outward[:, 1], outward[:, 0]) % (2 * np.pi) / (2 * np.pi)
    turned = np.abs(u - angle)[~poles]
    assert np.minimum(turned, 1 - turned).max() < 0.02
    heights = np.arccos(np.clip(outward[:, 2], -1, 1)) / np.pi
    assert min(np.abs(v - heights).max(), np.abs(1 - v - heights).max()) < 0.02


def test_mesh_below_the_triangle_limit_is_unchanged(tmp_path):
    path = tmp_path / "ball.obj"
    path.write_text(ball(10))
    mesh = read_mesh(path)
    assert decimate(mesh, 1000) is mesh


def test_only_visual_meshes_are_replaced(model):
    full, lean = mujoco.MjModel.from_xml_string(model), mujoco.MjModel.from_xml_string(reduce_visuals(model))
    seen, hit = (full.mesh(name).id for name in ("seen", "hit"))
    assert full.mesh_facenum[seen] > 10000
    assert 0 < lean.mesh_facenum[seen] <= MAX_FACES
    assert lean.mesh_facenum[hit] == full.mesh_facenum[hit]
    assert (int(lean.tex_width[0]), int(lean.tex_height[0])) == (MAX_TEXTURE, MAX_TEXTURE // 2)
    for name in ("body_mass", "body_inertia", "body_ipos", "body_iquat", "body_invweight0"):
        np.testing.assert_array_equal(getattr(lean, name), getattr(full, name), err_msg=name)
    size = [np.ptp(m.mesh_vert[:][m.mesh_vertadr[seen] :][: m.mesh_vertnum[seen]], axis=0).max() for m in (full, lean)]
    assert size[1] == pytest.approx(size[0], rel=0.02), "the scale of the XML still applies"


@pytest.mark.parametrize("marked", [True, False])
def test_copies_of_textures_keep_the_srgb_chunk(marked, model, tmp_path):
    """With `texture_colorspace=auto`, lean and full rendering have the same colors."""
    from PIL import Image, PngImagePlugin

    from embodyrl.envs.libero.rendering import LINEAR, SRGB

    info = PngImagePlugin.PngInfo()
    if marked:
        info.add(b"sRGB", b"\0")
    Image.new("RGB", (1200, 600), (200, 100, 50)).save(tmp_path / "wood.png", pnginfo=info)
    models = [mujoco.MjModel.from_xml_string(xml) for xml in (model, reduce_visuals(model))]
    assert [int(m.tex_colorspace[0]) for m in models] == [SRGB if marked else LINEAR] * 2


def test_constants_match_mujoco():
    from embodyrl.envs.libero.rendering import LINEAR, SRGB

    assert (mujoco.mjtColorSpace.mjCOLORSPACE_LINEAR, mujoco.mjtColorSpace.mjCOLORSPACE_SRGB) == (LINEAR, SRGB)


def test_cached_copies_are_updated_when_the_source_changes(model, tmp_path):
    first = reduce_visuals(model)
    files = {path: path.stat().st_mtime_ns for path in cache_folder().iterdir()}
    assert len(files) == 2
    assert reduce_visuals(model) == first
    assert {path: path.stat().st_mtime_ns for path in cache_folder().iterdir()} == files
    (tmp_path / "ball.obj").write_text(ball(61))
    assert reduce_visuals(model) != first


@pytest.mark.integration
def test_cache_can_be_built_concurrently(model, tmp_path):
    code = (
        "import sys; from embodyrl.envs.libero.lean import reduce_visuals as reduce; "
        "sys.stdout.write(reduce(sys.stdin.read()))"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for run in runs:
        assert run.stdin is not None
        run.stdin.write(model)
        run.stdin.close()
    outputs = [run.stdout.read() for run in runs if run.stdout is not None]
    for run in runs:
        assert run.wait(60) == 0
        run.stdout.close()
    assert outputs[0] == outputs[1] == outputs[2]
    assert sorted(path.suffix for path in cache_folder().iterdir()) == [".msh", ".png"]
    assert mujoco.MjModel.from_xml_string(outputs[0]).nmesh == 2


def test_unusable_cache_error_contains_the_fix(model, tmp_path, monkeypatch):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(EnvError, match="XDG_CACHE_HOME"):
        reduce_visuals(model)


def test_a_failed_write_leaves_no_file(model, monkeypatch):
    def full_disk(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(EnvError, match="No space left"):
        reduce_visuals(model)
    assert list(cache_folder().iterdir()) == []
