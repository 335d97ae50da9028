"""Colors of LIBERO's textures: those of the files, and of frames that MuJoCo 3.3.2 rendered."""

from pathlib import Path

import numpy as np
import pytest
from settings import env_of

from embodyrl.envs.libero import install
from embodyrl.envs.libero.factory import FACTORY, TextureColorspace
from embodyrl.envs.protocol import EnvContext

mujoco = pytest.importorskip("mujoco")

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]

FRAMES = sorted((Path(__file__).parents[2] / "golden" / "libero_mujoco_332").glob("*.png"))


def read_image(path):
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB"))


def textures(model):
    """Yield the path and the pixels [H, W, 3] of each texture that comes from a file."""
    for texture in np.flatnonzero(model.tex_pathadr[:] >= 0):
        path = bytes(model.paths[model.tex_pathadr[texture] :]).partition(b"\0")[0].decode()
        shape = model.tex_height[texture], model.tex_width[texture], model.tex_nchannel[texture]
        yield path, model.tex_data[model.tex_adr[texture] :][: np.prod(shape)].reshape(shape)


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.stem)
def test_textures_and_frames_match_mujoco_3_3_2(path):
    from embodyrl.envs.libero.rendering import SRGB
    from embodyrl.envs.libero.simulator import TaskSimulator

    suite, _, task = path.stem.rpartition("_")
    install.prepare_process()
    entry = install.get_suite_tasks(suite)[int(task)]
    sim = TaskSimulator(install.get_libero_path("bddl_files") / entry.problem_folder / entry.bddl_file)
    sim.reset(install.load_init_states(suite, int(task))[0], 0)
    differences = np.abs(sim.render_frame("agentview", 128, 128).astype(int) - read_image(path)).max(-1)
    files = list(textures(sim._model))
    colorspaces = sim._model.tex_colorspace.tolist()
    sim.close()
    assert (differences > 2).mean() <= 0.001, "MuJoCo 3.3.7 with decoded textures: 0.4 % to 81 %"
    assert len(files) > 10
    for file, pixels in files:
        np.testing.assert_array_equal(pixels, read_image(file), err_msg=file)
    assert SRGB not in colorspaces


def test_four_texture_files_have_an_srgb_chunk():
    assets = install.get_libero_path("assets")
    marked = [path for path in assets.rglob("*.png") if b"sRGB" in path.read_bytes()[:200]]
    assert {path.relative_to(assets).as_posix() for path in marked} == {
        "stable_hope_objects/new_salad_dressing/texture_map.png",
        "stable_hope_objects/salad_dressing/texture_map.png",
        "textures/light-gray-floor-tile.png",
        "textures/tile_grigia_caldera_porcelain_floor.png",
    }


def test_a_texture_is_rendered_with_the_values_of_its_file(tmp_path):
    """A plane of one color that emits all light."""
    from PIL import Image, PngImagePlugin

    install.prepare_process()
    from robosuite.utils.binding_utils import MjRenderContextOffscreen, MjSim

    from embodyrl.envs.libero.rendering import set_linear_colorspace

    info = PngImagePlugin.PngInfo()
    info.add(b"sRGB", b"\0")
    Image.new("RGB", (16, 16), (200, 100, 50)).save(tmp_path / "wood.png", pnginfo=info)
    sim = MjSim.from_xml_string(f"""
        <mujoco>
          <visual><headlight ambient="0 0 0" diffuse="0 0 0" specular="0 0 0"/></visual>
          <asset>
            <texture name="wood" type="2d" file="{tmp_path}/wood.png"/>
            <material name="wood" texture="wood" emission="1"/>
          </asset>
          <worldbody>
            <camera name="top" pos="0 0 1"/>
            <geom type="plane" size="5 5 1" material="wood"/>
          </worldbody>
        </mujoco>
    """)
    context = MjRenderContextOffscreen(sim, device_id=-1)
    for expected in ((147, 32, 8), (200, 100, 50)):  # decoded by MuJoCo, and then the values of the file
        image = sim.render(camera_name="top", width=32, height=32)
        np.testing.assert_allclose(image.reshape(-1, 3), [expected] * 32**2, atol=1)
        set_linear_colorspace(context)
    sim.free()


@pytest.mark.parametrize("profile", ["lean", "full"])
@pytest.mark.parametrize("space", list(TextureColorspace))
def test_texture_colorspace_key_selects_the_colors(space, profile):
    from embodyrl.envs.libero.rendering import SRGB

    cfg = env_of("libero", task_suite_name="libero_object", render_profile=profile, texture_colorspace=space)
    sims = FACTORY.simulators(cfg, EnvContext())
    model = sims.pool.loaded[0].simulator._env.sim._render_context_offscreen.model._model
    decoded = SRGB in model.tex_colorspace.tolist()
    sims.close()
    assert decoded == (space is TextureColorspace.auto)
