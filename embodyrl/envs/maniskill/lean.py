"""`env.render_profile=lean`: the same physics with visual meshes that a software renderer draws quickly.

The stock Panda has 135 000 triangles; only what is looked at is replaced, collision shapes never.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.envs.decimate import decimate, weld
from embodyrl.envs.small_copies import small_copy

MAX_FACES = 400
"""Triangles per part of a mesh; a robot link has about a dozen parts."""


@contextlib.contextmanager
def lean_visuals() -> Iterator[None]:
    """Within this context SAPIEN's builders take small copies of GLB meshes."""
    from sapien.wrapper.actor_builder import ActorBuilder  # pyright: ignore[reportMissingImports]

    original = ActorBuilder.add_visual_from_file

    def add(self: Any, filename: str, *args: Any, **kwargs: Any) -> Any:
        path = Path(filename)
        if path.suffix.lower() == ".glb":
            path = small_copy(path, f"{MAX_FACES} faces", ".glb", lambda: _reduced(path))
        return original(self, str(path), *args, **kwargs)

    ActorBuilder.add_visual_from_file = add
    try:
        yield
    finally:
        ActorBuilder.add_visual_from_file = original


def _reduced(path: Path) -> bytes:
    import trimesh  # pyright: ignore[reportMissingImports]
    from trimesh.visual import TextureVisuals  # pyright: ignore[reportMissingImports]

    scene: Any = trimesh.load(path, force="scene")
    for name, part in list(scene.geometry.items()):
        if len(part.faces) <= MAX_FACES:
            continue
        uv = getattr(part.visual, "uv", None)
        textured = uv is not None and len(uv) == len(part.vertices)
        texcoord = np.asarray(uv, np.float32) if textured else np.zeros((1, 2), np.float32)
        faces = np.asarray(part.faces)
        mesh = weld(
            np.asarray(part.vertices, np.float32),
            faces,
            texcoord,
            faces if textured else np.zeros_like(faces),
            textured,
        )
        small = decimate(mesh, MAX_FACES)
        visual = TextureVisuals(
            uv=small.texcoord if textured else None, material=getattr(part.visual, "material", None)
        )
        scene.geometry[name] = trimesh.Trimesh(
            small.position, small.faces, vertex_normals=small.normal, visual=visual, process=False
        )
    return scene.export(file_type="glb", include_normals=True)
