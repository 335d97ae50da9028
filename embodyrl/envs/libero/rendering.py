"""Rendering of a LIBERO task with lean visuals: less work for a software renderer, and the same pixels.

A software renderer spends most of its time on vertices. Lean models have no shadows or reflections, so the pixels of a
geom depend only on the geom, the lights and the camera, and three kinds of work can be skipped:

- geoms whose bounding box is outside the view of the camera,
- sites with a negative alpha value, which MuJoCo processes although they are invisible,
- for a camera that does not move, objects at rest: they are rendered once, and merged with the other geoms by depth.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple

import mujoco as _mujoco  # pyright: ignore[reportMissingImports]
import numpy as np
import numpy.typing as npt

from embodyrl.types import ByteArray, FloatArray

mujoco: Any = _mujoco

LINEAR, SRGB = 1, 2
"""Values of `mujoco.mjtColorSpace`, which versions before 3.3.3 do not have."""
_HIDDEN_GROUP = 5
"""Group of geoms and sites that robosuite does not render."""
MODEL_FIELDS = ("body_pos", "body_quat", "site_rgba", "cam_pos", "cam_quat")
"""Model fields that change at run time: poses of fixtures (at reset), visibility of sites (a burner), and cameras."""
_MAX_LAYERS = 128
"""Maximum number of stored images of objects at rest, and of sets of these objects."""
_MAX_POSES = 4096
"""Number of stored poses of objects: an object is at rest if its pose was rendered before."""


class _PosedObject(NamedTuple):
    """Geoms of one object, or all geoms that are fixed to the world, with their poses."""

    root: int
    """Root body of the object; 0: the world."""
    geoms: bytes
    """Indices of the geoms, int64."""
    poses: bytes
    """Positions and rotations of the geoms as float32, the precision of MuJoCo's renderer."""


class View(NamedTuple):
    """Camera and size of an image."""

    camera: int
    height: int
    width: int


class _Image(NamedTuple):
    """Rendered image, with the depth that is needed to merge the image with another image."""

    pixels: ByteArray
    """[H, W, 3]"""
    depth: FloatArray
    """[H, W] depth, larger values are nearer."""
    opaque: bool
    """False if transparent parts were blended with the background."""


def set_linear_colorspace(context: Any) -> None:
    """Render the textures of robosuite's render context with the color values of their files.

    From version 3.3.3 on, MuJoCo decodes PNG files with an sRGB chunk, which makes them darker. LIBERO's data were
    rendered with earlier versions.
    """
    model = context.model._model
    context.gl_ctx.make_current()
    # Earlier versions do not have this field.
    for texture in np.flatnonzero(getattr(model, "tex_colorspace", 0) == SRGB):
        model.tex_colorspace[texture] = LINEAR
        mujoco.mjr_uploadTexture(model, context.con, texture)


class LeanRenderer:
    """Renders the cameras of a task with a separate lean model, which has the same bodies, geoms, sites and cameras."""

    def __init__(self, env: Any, xml: str) -> None:
        """Load the lean model.

        Args:
            env: robosuite's environment, whose state is rendered.
            xml: the lean model, without shadows.
        """
        from robosuite.utils.binding_utils import (  # pyright: ignore[reportMissingImports]
            MjRenderContextOffscreen,
            MjSim,
        )

        self._env = env
        self.sim: Any = MjSim.from_xml_string(xml)
        self._model, self._data = self.sim.model._model, self.sim.data._data
        self._model.vis.quality.offsamples = 0
        self._context: Any = MjRenderContextOffscreen(self.sim, device_id=env.render_gpu_device_id)
        original_context, env.sim._render_context_offscreen = env.sim._render_context_offscreen, self._context
        self._context.vopt.geomgroup[:] = original_context.vopt.geomgroup
        original_context.gl_ctx.make_current()
        del original_context  # frees the frame buffers of robosuite's own context
        self._context.scn.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._layers: OrderedDict[tuple[Any, ...], _Image] = OrderedDict()
        self._poses: OrderedDict[_PosedObject, None] = OrderedDict()
        is_fixed = self._model.body_weldid[self._model.cam_bodyid] == 0
        self._fixed = set(np.flatnonzero(is_fixed & (self._model.cam_mode == 0)).tolist())
        """Cameras that do not move during an episode."""
        self._groups = self._model.geom_group.copy()
        bodies = self._model.geom_bodyid
        self._root = np.where(self._model.body_weldid[bodies] == 0, 0, self._model.body_rootid[bodies])
        visible = np.flatnonzero(np.array(self._context.vopt.geomgroup)[self._groups])
        self._visible = visible[np.argsort(self._root[visible], kind="stable")]

    def update_poses(self) -> None:
        """Copy positions and changing model fields from the simulation."""
        model, data = self._env.sim.model._model, self._env.sim.data._data
        for name in MODEL_FIELDS:
            getattr(self._model, name)[:] = getattr(model, name)
        self._data.qpos[:] = data.qpos
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_comPos(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)

    def render(self, camera: str, height: int, width: int) -> ByteArray:
        """Render the view of a camera with the poses of the last `update_poses`; return [H, W, 3], bottom row first."""
        # Several models share this process, and MuJoCo renders into the current context.
        self._context.gl_ctx.make_current()
        self._enlarge_buffer(height, width)
        view = View(self._model.camera(camera).id, height, width)
        with self._without_invisible_sites():
            in_view = self._get_geoms_in_view(view.camera, width / height)
            if view.camera in self._fixed:
                resting, moving = self._split_by_motion(in_view)
                layer = self._get_layer(view, resting)
                image = self._render_geoms(view, moving, with_sky=False)
                if layer.opaque and image.opaque:
                    return _merge(layer, image).pixels
            return self._render_geoms(view, in_view, with_depth=False).pixels

    def close(self) -> None:
        """Free the model and its OpenGL objects."""
        # The context deletes objects by number in the current context, so make it current.
        self._context.gl_ctx.make_current()
        self.sim.free()
        vars(self).clear()

    def _split_by_motion(self, geoms: npt.NDArray[np.int64]) -> tuple[tuple[_PosedObject, ...], npt.NDArray[np.int64]]:
        """Return the objects at rest, whose poses were rendered before, and the geoms of all other objects."""
        data, roots = self._data, self._root[geoms]
        rows = np.concatenate([data.geom_xpos[geoms], data.geom_xmat[geoms]], axis=1).astype(np.float32)
        ends = [0, *(np.flatnonzero(np.diff(roots)) + 1).tolist(), len(geoms)]
        resting, moving = [], []
        for start, end in itertools.pairwise(ends) if len(geoms) else ():
            posed = _PosedObject(int(roots[start]), geoms[start:end].tobytes(), rows[start:end].tobytes())
            resting.append(posed) if posed in self._poses else moving.append(geoms[start:end])
            self._poses[posed] = None
            self._poses.move_to_end(posed)
        while len(self._poses) > _MAX_POSES:
            self._poses.popitem(last=False)
        return tuple(resting), np.concatenate([geoms[:0], *moving])

    def _get_layer(self, view: View, resting: tuple[_PosedObject, ...], *, with_sky: bool = True) -> _Image:
        """Return the image of the objects at rest, which is computed only if it is not stored."""
        data = self._data
        view_poses = (data.cam_xpos[view.camera], data.cam_xmat[view.camera], data.light_xpos, data.light_xdir)
        key = (view, with_sky, *(value.tobytes() for value in view_poses), resting)
        if key not in self._layers:
            # Each object has a separate image, merged by depth, because objects start and stop moving one by one.
            objects = [posed for posed in resting if posed.root]
            if objects and with_sky:
                fixed = self._get_layer(view, tuple(posed for posed in resting if not posed.root))
                image = reduce(_merge, [self._get_layer(view, (posed,), with_sky=False) for posed in objects], fixed)
            else:
                image = self._render_geoms(
                    view, np.frombuffer(b"".join(posed.geoms for posed in resting), np.int64), with_sky=with_sky
                )
            while len(self._layers) >= _MAX_LAYERS:
                self._layers.popitem(last=False)
            self._layers[key] = image
        self._layers.move_to_end(key)
        return self._layers[key]

    def _render_geoms(
        self, view: View, geoms: npt.NDArray[np.int64], *, with_depth: bool = True, with_sky: bool = True
    ) -> _Image:
        """Render only the given geoms, all visible sites and, with `with_sky`, the sky.

        Without `with_depth`, the depth and `opaque` are undefined. Without `with_sky`, because rendering the sky is
        slow, pixels without a geom are undefined and their depth is 0.
        """
        context, groups = self._context, self._model.geom_group
        context.cam.type, context.cam.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, view.camera
        scene, viewport = context.scn, mujoco.MjrRect(0, 0, view.width, view.height)
        groups[:] = _HIDDEN_GROUP
        groups[geoms] = self._groups[geoms]
        try:
            mujoco.mjv_updateScene(
                self._model, self._data, context.vopt, context.pert, context.cam, mujoco.mjtCatBit.mjCAT_ALL, scene
            )
        finally:
            groups[:] = self._groups
        scene.flags[mujoco.mjtRndFlag.mjRND_SKYBOX] = with_sky
        mujoco.mjr_render(viewport, scene, context.con)
        scene.flags[mujoco.mjtRndFlag.mjRND_SKYBOX] = 1
        size = view.height, view.width
        pixels, depth = np.empty((*size, 3), np.uint8), np.empty(size, np.float32)
        mujoco.mjr_readPixels(pixels, depth if with_depth else None, viewport, context.con)
        return _Image(pixels, depth, with_depth and not any(part.transparent for part in scene.geoms[: scene.ngeom]))

    def _enlarge_buffer(self, height: int, width: int) -> None:
        """Enlarge the frame buffer if it is too small."""
        buffer = self._context.con
        if width > buffer.offWidth or height > buffer.offHeight:
            self._context.update_offscreen_size(max(width, buffer.offWidth), max(height, buffer.offHeight))
        self._context.con.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR

    @contextmanager
    def _without_invisible_sites(self) -> Iterator[None]:
        """Exclude sites with a negative alpha value from rendering inside the `with` block."""
        sites = np.flatnonzero(self._model.site_rgba[:, 3] < 0)
        groups = self._model.site_group[sites]
        self._model.site_group[sites] = _HIDDEN_GROUP
        try:
            yield
        finally:
            self._model.site_group[sites] = groups

    def _get_geoms_in_view(self, camera: int, aspect: float) -> npt.NDArray[np.int64]:
        """Return the indices of visible geoms whose bounding boxes intersect the view of a camera."""
        model, data, geoms = self._model, self._data, self._visible
        slope = np.tan(np.radians(model.cam_fovy[camera]) / 2)
        # Normals of five planes, which point out of the view: in front of the near plane, right, left, top and bottom.
        plane_normals = [[0, 0, 1], [1, 0, aspect * slope], [-1, 0, aspect * slope], [0, 1, slope], [0, -1, slope]]
        normals = data.cam_xmat[camera].reshape(3, 3) @ np.transpose(plane_normals)
        offsets = np.array([-model.vis.map.znear * model.stat.extent, 0.0, 0.0, 0.0, 0.0])
        rotations = data.geom_xmat[geoms].reshape(-1, 3, 3)
        centers = (rotations @ model.geom_aabb[geoms, :3, None])[..., 0] + data.geom_xpos[geoms]
        extents = (np.abs(normals.T @ rotations) @ model.geom_aabb[geoms, 3:, None])[..., 0]
        is_outside = ((centers - data.cam_xpos[camera]) @ normals - extents > offsets).any(-1)
        return geoms[~is_outside | (model.geom_rbound[geoms] == 0)]  # planes have no bounding box


def _merge(back: _Image, front: _Image) -> _Image:
    """Merge two images by depth: each pixel comes from the nearer image; fast if few pixels come from `front`."""
    nearer = np.flatnonzero(front.depth > back.depth)
    pixels, depth = back.pixels.copy(), back.depth.copy()
    pixels.reshape(-1, 3)[nearer] = front.pixels.reshape(-1, 3)[nearer]
    depth.reshape(-1)[nearer] = front.depth.reshape(-1)[nearer]
    return _Image(pixels, depth, back.opaque and front.opaque)
