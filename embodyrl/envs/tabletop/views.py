"""Rendering of a table: a slanted front view, and a wrist view straight down from the gripper."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from embodyrl.envs.tabletop.world import BLOCK_HEIGHT, BLOCK_SIDE, PLATE_RADIUS, REACH, Point, World
from embodyrl.types import ByteArray, FloatArray

FRONT, WRIST = "front", "wrist"

MAX_SIZE = 1024
"""Maximum height and width of an image in pixels."""

Color = tuple[float, float, float]

_BLOCK_RGB: tuple[tuple[Color, ...], ...] = (
    ((214, 58, 50), (58, 164, 82), (52, 104, 214)),
    ((158, 26, 62), (112, 196, 150), (112, 168, 240)),
)
"""RGB colors of the blocks for each palette: default shades, and shades of `Axis.colours`."""
_PLATE_RGB: tuple[tuple[Color, ...], ...] = (
    ((246, 200, 52), (150, 84, 186), (250, 248, 244)),
    ((226, 216, 116), (104, 48, 150), (216, 222, 228)),
)
_STEEL_RGB: Color = (66, 70, 78)
_FINGER_RGB: Color = (40, 42, 48)
_LAMP_OPEN_RGB: Color = (236, 242, 246)
_LAMP_CLOSED_RGB: Color = (255, 176, 0)
"""Color of the gripper's lamp when the gripper is closed; no block has this color."""
_SHADOW_RGB: Color = (52, 38, 28)
_WALL_RGB = np.array((222, 228, 232), np.float32)
_WOOD_RGB = np.array((192, 164, 130), np.float32)
_TABLE_EDGE_RGB = np.array((134, 108, 82), np.float32)

_Y_SCALE = 0.82
"""Image rows per meter in y, relative to columns per meter in x, in the front view (sine of the camera angle)."""
_Z_SCALE = 0.57
"""Image rows per meter in z, relative to columns per meter in x, in the front view (cosine of the camera angle)."""
_FRONT_WIDTH = 0.72
_FRONT_BOTTOM = -0.32
_TABLE_HALF_WIDTH = REACH + 0.02
_TEXELS_PER_M = 800
_TEXTURE_HALF_WIDTH = 0.6

_WRIST_HALF_WIDTH, _WRIST_WIDENING = 0.12, 0.9
"""Half width in meters of the wrist view at height 0, and its increase per meter of height."""

_FINGER_OPEN, _FINGER_HOLDING, _FINGER_CLOSED = 0.046, 0.035, 0.008
"""Distance in meters between each finger and the middle of the gripper: open, closed around a block, fully closed."""


_INDICES = np.arange(MAX_SIZE, dtype=np.float32)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
"""Preallocated arrays and constants, because numpy's overhead dominates for shapes of few pixels."""


@dataclass(frozen=True, slots=True)
class _Canvas:
    """Float image [S, S, 3] (0..255) with world coordinates: column = scale * (u - left), row = scale * (top - v)."""

    pixels: FloatArray
    scale: float
    left: float
    top: float

    def box(
        self,
        u: float,
        v: float,
        half_u: float,
        half_v: float,
        color: Color,
        *,
        blur: float = 0.0,
        strength: float = 1.0,
    ) -> None:
        """Blend an axis-aligned box into the image; edges fade over `blur` meters, or at least one pixel."""
        fade = max(blur * self.scale, 1.0)
        rows, cover_v = self._compute_coverage((self.top - v) * self.scale, half_v * self.scale, fade)
        cols, cover_u = self._compute_coverage((u - self.left) * self.scale, half_u * self.scale, fade)
        if strength < 1.0:
            cover_v *= np.float32(strength)
        self._blend(rows, cols, cover_v[:, None] * cover_u, color)

    def disc(self, u: float, v: float, radius: float, flat: float, color: Color) -> None:
        """Blend an ellipse with the half axes `radius` and `flat * radius` into the image."""
        size = len(self.pixels)
        x, y, r = (u - self.left) * self.scale, (self.top - v) * self.scale, radius * self.scale
        rows, cols = _get_pixel_slice(y, flat * r + 1.0, size), _get_pixel_slice(x, r + 1.0, size)
        dy = (_INDICES[rows] - np.float32(y - 0.5)) / np.float32(flat)
        dx = _INDICES[cols] - np.float32(x - 0.5)
        cover = np.float32(r + 0.5) - np.sqrt((dy * dy)[:, None] + dx * dx)
        np.maximum(np.minimum(cover, _ONE, out=cover), _ZERO, out=cover)
        self._blend(rows, cols, cover, color)

    def to_uint8(self) -> ByteArray:
        """Return the image rounded to uint8."""
        return (self.pixels + 0.5).astype(np.uint8)

    def _compute_coverage(self, center: float, half: float, fade: float) -> tuple[slice, FloatArray]:
        """Return the slice of pixels that an interval covers, and the coverage (0 to 1) of each pixel."""
        pixels = _get_pixel_slice(center, half + 0.5 * fade, len(self.pixels))
        cover = np.abs(_INDICES[pixels] - np.float32(center - 0.5))
        cover *= np.float32(-1.0 / fade)
        cover += np.float32(half / fade + 0.5)
        # If a stripe is thinner than its fading edges, no pixel is fully covered.
        np.minimum(cover, np.float32(min(1.0, 2.0 * half / fade)), out=cover)
        return pixels, np.maximum(cover, _ZERO, out=cover)

    def _blend(self, rows: slice, cols: slice, cover: FloatArray, color: Color) -> None:
        window = self.pixels[rows, cols]
        window += (np.array(color, np.float32) - window) * cover[:, :, None]  # in place: a view of the image


def render_front(world: World, size: int) -> ByteArray:
    """Render the front view [size, size, 3] uint8; the near edge of the table is at the bottom."""
    canvas = _Canvas(
        _get_front_background(size).copy(), size / _FRONT_WIDTH, -_FRONT_WIDTH / 2, _FRONT_BOTTOM + _FRONT_WIDTH
    )
    for (x, y), color in zip(world.plates, _PLATE_RGB[world.palette], strict=True):
        _draw_front_plate(canvas, x, y * _Y_SCALE, color)
    heights = [world.z if index == world.held_block else 0.0 for index in range(len(world.blocks))]
    for (x, y), z in zip(world.blocks, heights, strict=True):
        shift = 0.012 + 0.4 * z
        half = BLOCK_SIDE / 2
        canvas.box(
            x + shift,
            (y - 0.3 * shift) * _Y_SCALE,
            half,
            half * _Y_SCALE,
            _SHADOW_RGB,
            blur=0.02 + 0.2 * z,
            strength=0.45,
        )
    canvas.box(world.x, world.y * _Y_SCALE, 0.045, 0.02, _SHADOW_RGB, blur=0.02 + 0.15 * world.z, strength=0.5)
    # Painter's order, far objects first; the gripper is painted with the block that it could hold.
    objects = [(y, index) for index, (_, y) in enumerate(world.blocks)]
    objects.append((world.y - 0.005, -1))
    for _, index in sorted(objects, reverse=True):
        if index < 0:
            _draw_front_gripper(canvas, world)
        else:
            _draw_front_block(canvas, world.blocks[index], heights[index], _BLOCK_RGB[world.palette][index])
    return canvas.to_uint8()


def render_wrist(world: World, size: int) -> ByteArray:
    """Render the wrist view [size, size, 3] uint8, centered on the gripper; the view widens with height."""
    half = _WRIST_HALF_WIDTH + _WRIST_WIDENING * world.z
    canvas = _Canvas(_crop_texture(world.x, world.y, half, size), size / (2 * half), world.x - half, world.y + half)
    for (x, y), color in zip(world.plates, _PLATE_RGB[world.palette], strict=True):
        if max(abs(x - world.x), abs(y - world.y)) < half + PLATE_RADIUS:
            canvas.disc(x, y, PLATE_RADIUS, 1.0, _scale_color(color, 0.8))
            canvas.disc(x, y, PLATE_RADIUS * 0.82, 1.0, color)
    side = BLOCK_SIDE / 2
    for index, (x, y) in enumerate(world.blocks):
        if index != world.held_block and max(abs(x - world.x), abs(y - world.y)) < half + BLOCK_SIDE:
            canvas.box(x + 0.012, y - 0.006, side, side, _SHADOW_RGB, blur=0.02, strength=0.45)
            canvas.box(x, y, side, side, _scale_color(_BLOCK_RGB[world.palette][index], 0.75))
            canvas.box(x, y, side * 0.86, side * 0.86, _BLOCK_RGB[world.palette][index])
    # Fingers and a held block move with the camera, so their size in the image is constant.
    hand = _Canvas(canvas.pixels, size / (2 * _WRIST_HALF_WIDTH), -_WRIST_HALF_WIDTH, _WRIST_HALF_WIDTH)
    if world.held_block is not None:
        hand.box(0.0, 0.0, side, side, _scale_color(_BLOCK_RGB[world.palette][world.held_block], 0.75))
        hand.box(0.0, 0.0, side * 0.86, side * 0.86, _BLOCK_RGB[world.palette][world.held_block])
    finger_distance = _get_finger_distance(world)
    for sign in (-1.0, 1.0):
        hand.box(sign * finger_distance, 0.0, 0.007, 0.022, _FINGER_RGB)
        hand.box(sign * finger_distance, 0.0, 0.0035, 0.018, _LAMP_CLOSED_RGB if world.closed else _LAMP_OPEN_RGB)
    return canvas.to_uint8()


def _draw_front_plate(canvas: _Canvas, u: float, v: float, color: Color) -> None:
    canvas.disc(u + 0.008, v - 0.006, PLATE_RADIUS, _Y_SCALE, _scale_color(tuple(_WOOD_RGB.tolist()), 0.72))
    canvas.disc(u, v, PLATE_RADIUS, _Y_SCALE, _scale_color(color, 0.8))
    canvas.disc(u, v + 0.001, PLATE_RADIUS * 0.82, _Y_SCALE, color)


def _draw_front_block(canvas: _Canvas, position: Point, z: float, color: Color) -> None:
    half, half_depth, height = BLOCK_SIDE / 2, BLOCK_SIDE / 2 * _Y_SCALE, BLOCK_HEIGHT * _Z_SCALE
    bottom = position[1] * _Y_SCALE + z * _Z_SCALE - half_depth
    canvas.box(position[0], bottom + height / 2, half, height / 2, _scale_color(color, 0.68))
    canvas.box(position[0], bottom + height + half_depth, half, half_depth, color)
    canvas.box(position[0], bottom + height + half_depth, half * 0.8, half_depth * 0.8, _scale_color(color, 1.12))


def _draw_front_gripper(canvas: _Canvas, world: World) -> None:
    v = world.y * _Y_SCALE + world.z * _Z_SCALE
    finger_distance = _get_finger_distance(world)
    finger_length = 0.075 * _Z_SCALE
    palm = v + 2 * finger_length
    canvas.box(world.x, palm + 0.06, 0.012, 0.05, _scale_color(_STEEL_RGB, 1.5))
    for sign in (-1.0, 1.0):
        canvas.box(world.x + sign * finger_distance, v + finger_length, 0.0065, finger_length, _FINGER_RGB)
        canvas.box(
            world.x + sign * (finger_distance - 0.002),
            v + finger_length,
            0.0015,
            finger_length,
            _scale_color(_FINGER_RGB, 2.0),
        )
    canvas.box(world.x, palm, 0.054, 0.014, _STEEL_RGB)
    canvas.box(world.x, palm + 0.002, 0.03, 0.006, _LAMP_CLOSED_RGB if world.closed else _LAMP_OPEN_RGB)


def _get_finger_distance(world: World) -> float:
    if not world.closed:
        return _FINGER_OPEN
    return _FINGER_CLOSED if world.held_block is None else _FINGER_HOLDING


def _get_pixel_slice(center: float, half: float, size: int) -> slice:
    """Return the slice of pixels of an interval, clipped to the image; empty outside the image."""
    start = min(max(int(center - half), 0), size)
    return slice(start, max(min(int(center + half) + 1, size), start))


def _scale_color(color: Color, factor: float) -> Color:
    red, green, blue = (min(channel * factor, 255.0) for channel in color)
    return red, green, blue


@lru_cache(maxsize=1)
def _get_texture() -> ByteArray:
    """Return a top view [rows, columns, 3] of the table and the floor; the first row is the far end."""
    count = int(2 * _TEXTURE_HALF_WIDTH * _TEXELS_PER_M)
    axis = (np.arange(count, dtype=np.float32) + 0.5) / _TEXELS_PER_M - _TEXTURE_HALF_WIDTH
    rng = np.random.default_rng(7)
    plank = np.floor((axis + 1.0) / 0.136).astype(int)
    tone = rng.uniform(-7.0, 7.0, plank.max() + 1)[plank]
    seam = np.where(np.abs((axis + 1.0) / 0.136 - np.round((axis + 1.0) / 0.136)) < 0.012, -22.0, 0.0)
    grain = np.repeat(rng.normal(0.0, 3.0, (count, count // 120)), 120, axis=1)
    smooth = np.cumsum(np.pad(grain, ((0, 0), (120, 0)), mode="edge"), axis=1)
    grain = (smooth[:, 120:] - smooth[:, :-120]) / 120
    image = _WOOD_RGB + (tone + seam)[::-1, None, None] + grain[:, :, None]
    outside = np.maximum(np.abs(axis)[:, None], np.abs(axis)) > _TABLE_HALF_WIDTH
    image[outside] = _TABLE_EDGE_RGB * 0.5
    return image.clip(0, 255).astype(np.uint8)


def _crop_texture(x: float, y: float, half: float, size: int) -> FloatArray:
    """Return the part of the top view around a point, up to `half` meters to each side."""
    offsets = (
        (np.arange(size, dtype=np.float32) + 0.5) * (2 * half / size) - half + _TEXTURE_HALF_WIDTH
    ) * _TEXELS_PER_M
    columns = (offsets + x * _TEXELS_PER_M).astype(np.intp)
    rows = (offsets - y * _TEXELS_PER_M).astype(np.intp)
    return _get_texture()[rows[:, None], columns].astype(np.float32)


@lru_cache(maxsize=4)
def _get_front_background(size: int) -> FloatArray:
    """Return the background of the front view: wall, table top and the near edge of the table."""
    pixel = _FRONT_WIDTH / size
    centers = (np.arange(size, dtype=np.float32) + 0.5) * pixel
    u, v = centers - _FRONT_WIDTH / 2, _FRONT_BOTTOM + _FRONT_WIDTH - centers
    y = v / _Y_SCALE
    image = np.empty((size, size, 3), np.float32)
    image[:] = _WALL_RGB - 26.0 * np.linspace(0.0, 1.0, size, dtype=np.float32)[:, None, None]
    on_top = np.flatnonzero(np.abs(y) < _TABLE_HALF_WIDTH)
    rows = ((_TEXTURE_HALF_WIDTH - y[on_top]) * _TEXELS_PER_M).astype(np.intp)
    columns = np.flatnonzero(np.abs(u) < _TABLE_HALF_WIDTH)
    texels = ((u[columns] + _TEXTURE_HALF_WIDTH) * _TEXELS_PER_M).astype(np.intp)
    image[on_top[:, None], columns] = _get_texture()[rows[:, None], texels]
    edge = np.flatnonzero((y <= -_TABLE_HALF_WIDTH) & (v > -_TABLE_HALF_WIDTH * _Y_SCALE - 0.035))
    image[edge[:, None], columns] = _TABLE_EDGE_RGB
    return image
