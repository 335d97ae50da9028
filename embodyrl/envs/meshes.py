"""Visual meshes with fewer triangles for `env.render_profile=lean`, cached on disk."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embodyrl.config.paths import cache_dir
from embodyrl.errors import EnvError, MissingDependencyError
from embodyrl.files import write_atomically

_NORMAL_WEIGHT = 0.5
_TEXCOORD_WEIGHT = 1.0
"""Weight of texture coordinates in the simplification error, relative to positions; `_NORMAL_WEIGHT` is the weight of
normals."""

_MERGE_DISTANCE = 1.0e-6
"""Maximum distance between merged vertices, as a fraction of the size of the mesh."""

_MAX_FACE_RATIO = 3
"""Ratio of remaining to requested faces above which a mesh is simplified by clustering, which ignores texture seams."""

_Floats = npt.NDArray[np.float32]
_Indices = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisualMesh:
    """Triangles with one normal and one texture coordinate per vertex."""

    position: _Floats
    """[P, 3] positions of the vertices, in the units of the file."""
    normal: _Floats
    """[P, 3] unit normals of the vertices."""
    texcoord: _Floats
    """[P, 2] texture coordinates of the vertices."""
    faces: _Indices
    """[F, 3] vertex indices of the triangles."""
    textured: bool

    def subset(self, faces: _Indices) -> VisualMesh:
        """Return a mesh with only `faces` [F', 3] and the vertices of these faces."""
        used, index = np.unique(faces, return_inverse=True)
        return VisualMesh(
            position=self.position[used],
            normal=self.normal[used],
            texcoord=self.texcoord[used],
            faces=index.reshape(-1, 3).astype(np.uint32),
            textured=self.textured,
        )

    def to_msh(self) -> bytes:
        """Return the mesh in MuJoCo's binary format (.msh)."""
        texcoord = self.texcoord if self.textured else self.texcoord[:0]
        header = struct.pack("4i", len(self.position), len(self.normal), len(texcoord), len(self.faces))
        arrays = (self.position, self.normal, texcoord, self.faces.astype(np.int32))
        return header + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def read_mesh(path: Path) -> VisualMesh:
    """Read a mesh file in any format that MuJoCo supports.

    Equal vertices are merged. Normals are smooth and weighted by area.
    """
    import mujoco as _mujoco  # pyright: ignore[reportMissingImports]

    mujoco: Any = _mujoco
    spec = mujoco.MjSpec()
    spec.add_mesh(name="mesh", file=str(path)).inertia = mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL
    geom = mujoco.mjtGeom.mjGEOM_MESH
    spec.worldbody.add_body().add_geom(type=geom, meshname="mesh", contype=0, conaffinity=0)
    model = spec.compile()
    # MuJoCo transforms a mesh into its inertial frame; undo that.
    rotation = np.zeros(9)
    mujoco.mju_quat2Mat(rotation, model.mesh_quat[0])
    position = (model.mesh_vert @ rotation.reshape(3, 3).T + model.mesh_pos[0]).astype(np.float32)
    texture = (model.mesh_texcoord, model.mesh_facetexcoord) if len(model.mesh_texcoord) else None
    return merge_vertices(position, model.mesh_face.copy(), texture)


def decimate(mesh: VisualMesh, max_faces: int) -> VisualMesh:
    """Reduce a mesh to about `max_faces` triangles.

    meshoptimizer collapses edges by quadric error with attributes.

    Raises:
        MissingDependencyError: meshoptimizer is not installed.
    """
    if len(mesh.faces) <= max_faces:
        return mesh
    # This simplification preserves texture seams, which may stop it early.
    faces = _simplify_faces(mesh, max_faces, sloppy=False)
    if len(faces) > _MAX_FACE_RATIO * max_faces:
        clustered = _simplify_faces(mesh, max_faces, sloppy=True)
        faces = clustered if 0 < len(clustered) < len(faces) else faces
    return mesh.subset(faces)


def merge_vertices(position: _Floats, faces: np.ndarray, texture: tuple[_Floats, np.ndarray] | None) -> VisualMesh:
    """Merge vertices with equal positions and texture coordinates; vertices at the same position share a normal.

    `texture` contains texture coordinates [T, 2], and for each corner of `faces` the index of its coordinates [F, 3].
    """
    texcoord, texcoord_faces = texture or (np.zeros((1, 2), np.float32), np.zeros_like(faces))
    size = float(np.ptp(position, axis=0).max()) or 1.0
    position_index = np.unique(
        np.round(position / (size * _MERGE_DISTANCE)).astype(np.int64), axis=0, return_inverse=True
    )[1].reshape(-1)
    texture_index = np.unique(np.round(texcoord / 1.0e-5).astype(np.int64), axis=0, return_inverse=True)[1].reshape(-1)
    corners = np.stack([position_index[faces.ravel()], texture_index[texcoord_faces.ravel()]], axis=1)
    vertices, first, index = np.unique(corners, axis=0, return_index=True, return_inverse=True)
    welded = index.reshape(-1, 3)
    position, texcoord = position[faces.ravel()[first]], texcoord[texcoord_faces.ravel()[first]]

    a, b, c = (position[welded[:, corner]] for corner in range(3))
    area_normal = np.cross(b - a, c - a)
    normal_sums = np.zeros((int(position_index.max()) + 1, 3))
    for corner in range(3):
        np.add.at(normal_sums, vertices[welded[:, corner], 0], area_normal)
    normal = normal_sums[vertices[:, 0]]
    length = np.linalg.norm(normal, axis=1, keepdims=True)
    normal = np.where(length > 0, normal / np.maximum(length, 1.0e-30), [0.0, 0.0, 1.0])
    i, j, corner = welded.T
    proper_faces = welded[(i != j) & (j != corner) & (corner != i)]
    return VisualMesh(
        position=np.ascontiguousarray(position, np.float32),
        normal=normal.astype(np.float32),
        texcoord=np.ascontiguousarray(texcoord, np.float32),
        faces=proper_faces.astype(np.uint32),
        textured=texture is not None,
    )


def _simplify_faces(mesh: VisualMesh, max_faces: int, *, sloppy: bool) -> _Indices:
    """Return fewer faces [F', 3] by edge collapse, or, if `sloppy`, by clustering that ignores the topology."""
    library = _load_library()
    source, out = np.ascontiguousarray(mesh.faces.ravel()), np.zeros(mesh.faces.size, np.uint32)
    position = mesh.position
    head = (out.ctypes.data, source.ctypes.data, len(source), position.ctypes.data, len(position), 12)
    if sloppy:
        count = library.meshopt_simplifySloppy(*head, 3 * max_faces, 1.0, None)
    else:
        attributes = np.ascontiguousarray(np.concatenate([mesh.normal, mesh.texcoord], axis=1))
        weights = np.array([_NORMAL_WEIGHT] * 3 + [_TEXCOORD_WEIGHT] * 2, np.float32)
        tail = (attributes.ctypes.data, 20, weights.ctypes.data, 5, None, 3 * max_faces, 1.0, 0, None)
        count = library.meshopt_simplifyWithAttributes(*head, *tail)
    return out[:count].reshape(-1, 3)


@functools.cache
def _load_library() -> ctypes.CDLL:
    """Load the bindings of meshoptimizer's two simplifiers.

    The Python wrapper of the package declares wrong arguments for the first simplifier (no vertex locks).
    """
    try:
        import meshoptimizer  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingDependencyError(
            f"env.render_profile=lean needs meshoptimizer, which cannot be imported: {error}. "
            "Fix: pip install meshoptimizer==0.2.30a0, or set env.render_profile=full."
        ) from error
    folder = Path(meshoptimizer.__file__).parent
    files = [file for file in folder.glob("*meshoptimizer*") if file.suffix in (".so", ".dylib", ".pyd", ".dll")]
    library, size, array = ctypes.CDLL(str(files[0])), ctypes.c_size_t, ctypes.c_void_p
    simplify, simplify_sloppy = library.meshopt_simplifyWithAttributes, library.meshopt_simplifySloppy
    simplify.restype = simplify_sloppy.restype = size
    head = [array, array, size, array, size, size]
    simplify.argtypes = [*head, array, size, array, size, array, size, ctypes.c_float, ctypes.c_uint, array]
    simplify_sloppy.argtypes = [*head, size, ctypes.c_float, array]
    return library


_VERSION = 2
"""Version in the cache key; increase it when the code writes different files for the same settings."""


def cache_folder() -> Path:
    """Return the cache folder of the reduced meshes; users may delete the folder at any time."""
    return cache_dir() / "lean"


def get_reduced_copy(source: Path, setting: str, suffix: str, reduce: Callable[[Path], bytes]) -> Path:
    """Return the path of the reduced copy of a file in the cache; create the copy if the cache does not contain it.

    Args:
        source: original file.
        setting: text in the cache key that identifies the reduction, for example "2000 faces".
        suffix: file name suffix of the copy.
        reduce: function that returns the content of the copy.

    Raises:
        EnvError: the cache folder is not writable.
    """
    stat = source.stat()
    key = f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns} {setting} {_VERSION}"
    folder = cache_folder()
    target = folder / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}{suffix}"
    if target.is_file():
        return target
    content = reduce(source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(target, content)
    except OSError as error:
        raise EnvError(
            f"env.render_profile=lean: the cache {folder} cannot be written: {error}. "
            "Fix: free some space (60 MB), or set XDG_CACHE_HOME to a writable folder."
        ) from error
    return target
