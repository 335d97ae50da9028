"""Rendering of a LIBERO task with lean visuals: less work for a software renderer, and the same pixels.

A software renderer spends most of its time on vertices. Lean models have no shadows and reflections, so the pixels of a
geom depend only on the geom, the lights and the camera, and three kinds of work can be skipped:

- geoms whose bounding box is outside the view of the camera,
- sites with a negative alpha value, which MuJoCo processes although they are invisible,
- for a camera that does not move, geoms at rest: they are rendered once, and merged with the other geoms by depth.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple

import mujoco as _mujoco  # pyright: ignore[reportMissingImports]
import numpy as np
import numpy.typing as npt

from embodyrl.types import ByteArray, FloatArray

mujoco: Any = _mujoco

_NEVER_DRAWN = 5
"""Group of geoms and sites that robosuite does not render."""
_MOVED = ("body_pos", "body_quat", "cam_pos", "cam_quat", "site_rgba")
"""Model fields that change at run time and affect images."""
_LAYERS = 128
"""Maximum number of stored images of geoms at rest, and of sets of these geoms."""
_POSES = 4096
"""Number of stored poses of geoms: a geom is at rest if its pose was rendered before."""

Pose = tuple[int, bytes]
"""Index of a geom, and its position and rotation as float32, the precision of MuJoCo's renderer."""


class View(NamedTuple):
    """Camera and size of an image."""

    camera: int
    height: int
    width: int


class _Image(NamedTuple):
    """Rendered image, and what merging with another image requires."""

    pixels: ByteArray
    """[H, W, 3]"""
    depth: FloatArray
    """[H, W] depth, larger values are nearer."""
    opaque: bool
    """False if transparent parts were blended with the background."""


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
        unused, env.sim._render_context_offscreen = env.sim._render_context_offscreen, self._context
        self._context.vopt.geomgroup[:] = unused.vopt.geomgroup
        unused.gl_ctx.make_current()
        del unused  # frees the frame buffers of robosuite's own context
        self._context.scn.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._layers: OrderedDict[tuple[Any, ...], _Image] = OrderedDict()
        self._poses: OrderedDict[Pose, None] = OrderedDict()
        still = self._model.body_weldid[self._model.cam_bodyid] == 0
        self._fixed = set(np.flatnonzero(still & (self._model.cam_mode == 0)).tolist())
        """Cameras that do not move during an episode."""
        self._groups = self._model.geom_group.copy()
        self._visible = np.flatnonzero(np.array(self._context.vopt.geomgroup)[self._groups])
        self._static = set(np.flatnonzero(self._model.body_weldid[self._model.geom_bodyid] == 0).tolist())

    def pose(self) -> None:
        """Copy the positions of the simulation."""
        model, data = self._env.sim.model._model, self._env.sim.data._data
        for name in _MOVED:
            getattr(self._model, name)[:] = getattr(model, name)
        self._data.qpos[:] = data.qpos
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_comPos(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)

    def render(self, camera: str, height: int, width: int) -> ByteArray:
        """Render a camera after `pose`; return [H, W, 3] in OpenGL row order."""
        # Several models share this process, and MuJoCo renders into the current context.
        self._context.gl_ctx.make_current()
        self._fit(height, width)
        view = View(self._model.camera(camera).id, height, width)
        with self._without_invisible_sites():
            shown = self._in_view(view.camera, width / height)
            if view.camera in self._fixed and (resting := self._at_rest(shown)):
                layer = self._layer(view, resting)
                image = self._image_of(view, sorted({*shown.tolist()}.difference(geom for geom, _ in resting)))
                if layer.opaque and image.opaque:
                    return _merged(layer, image).pixels
            return self._image_of(view, shown, merged=False).pixels

    def close(self) -> None:
        """Free the model and its OpenGL objects."""
        # The context deletes objects by number in the current context, so make it current.
        self._context.gl_ctx.make_current()
        self.sim.free()
        vars(self).clear()

    def _at_rest(self, geoms: npt.NDArray[np.intp]) -> tuple[Pose, ...]:
        """Return the poses that were rendered before, and store the others."""
        data = self._data
        rows = np.concatenate([data.geom_xpos[geoms], data.geom_xmat[geoms]], axis=1).astype(np.float32)
        poses = list(zip(geoms.tolist(), map(bytes, rows), strict=True))
        resting = tuple(pose for pose in poses if pose in self._poses)
        for pose in poses:
            self._poses[pose] = None
            self._poses.move_to_end(pose)
        while len(self._poses) > _POSES:
            self._poses.popitem(last=False)
        return resting

    def _layer(self, view: View, resting: tuple[Pose, ...]) -> _Image:
        """Return the image of the geoms at rest, which is computed only if it is not stored."""
        data = self._data
        place = (data.cam_xpos[view.camera], data.cam_xmat[view.camera], data.light_xpos, data.light_xdir)
        key = (view, *(value.tobytes() for value in place), resting)
        if key not in self._layers:
            # Objects start and stop moving one by one: each has its own image, merged by depth.
            static = tuple(pose for pose in resting if pose[0] in self._static)
            parts = [part for part in (static, *((pose,) for pose in resting if pose[0] not in self._static)) if part]
            if len(parts) == 1:
                image = self._image_of(view, [geom for geom, _ in resting])
            else:
                image = reduce(_merged, [self._layer(view, part) for part in parts])
            while len(self._layers) >= _LAYERS:
                self._layers.popitem(last=False)
            self._layers[key] = image
        self._layers.move_to_end(key)
        return self._layers[key]

    def _image_of(self, view: View, geoms: Sequence[int] | npt.NDArray[np.intp], *, merged: bool = True) -> _Image:
        """Render only the given geoms, and all visible sites; without `merged`, the depth is undefined."""
        context, groups = self._context, self._model.geom_group
        context.cam.type, context.cam.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, view.camera
        scene, port = context.scn, mujoco.MjrRect(0, 0, view.width, view.height)
        groups[:] = _NEVER_DRAWN
        groups[geoms] = self._groups[geoms]
        try:
            mujoco.mjv_updateScene(
                self._model, self._data, context.vopt, context.pert, context.cam, mujoco.mjtCatBit.mjCAT_ALL, scene
            )
        finally:
            groups[:] = self._groups
        mujoco.mjr_render(port, scene, context.con)
        size = view.height, view.width
        pixels, depth = np.empty((*size, 3), np.uint8), np.empty(size, np.float32)
        mujoco.mjr_readPixels(pixels, depth if merged else None, port, context.con)
        return _Image(pixels, depth, not any(part.transparent for part in scene.geoms[: scene.ngeom]))

    def _fit(self, height: int, width: int) -> None:
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
        self._model.site_group[sites] = _NEVER_DRAWN
        try:
            yield
        finally:
            self._model.site_group[sites] = groups

    def _in_view(self, camera: int, aspect: float) -> npt.NDArray[np.intp]:
        """Return the indices of visible geoms whose bounding boxes intersect the view of a camera."""
        model, data, geoms = self._model, self._data, self._visible
        slope = np.tan(np.radians(model.cam_fovy[camera]) / 2)
        # Normals of five planes, which point out of the view: in front of the near plane, right, left, top and bottom.
        sides = [[0, 0, 1], [1, 0, aspect * slope], [-1, 0, aspect * slope], [0, 1, slope], [0, -1, slope]]
        normals = data.cam_xmat[camera].reshape(3, 3) @ np.transpose(sides)
        offsets = np.array([-model.vis.map.znear * model.stat.extent, 0.0, 0.0, 0.0, 0.0])
        rotations = data.geom_xmat[geoms].reshape(-1, 3, 3)
        centers = (rotations @ model.geom_aabb[geoms, :3, None])[..., 0] + data.geom_xpos[geoms]
        reaches = (np.abs(normals.T @ rotations) @ model.geom_aabb[geoms, 3:, None])[..., 0]
        outside = ((centers - data.cam_xpos[camera]) @ normals - reaches > offsets).any(-1)
        return geoms[~outside | (model.geom_rbound[geoms] == 0)]  # planes have no bounding box


def _merged(back: _Image, front: _Image) -> _Image:
    """Return the nearer pixels of two images; `front` has few pixels in front of `back`."""
    nearer = np.flatnonzero(front.depth > back.depth)
    pixels, depth = back.pixels.copy(), back.depth.copy()
    pixels.reshape(-1, 3)[nearer] = front.pixels.reshape(-1, 3)[nearer]
    depth.reshape(-1)[nearer] = front.depth.reshape(-1)[nearer]
    return _Image(pixels, depth, back.opaque and front.opaque)
