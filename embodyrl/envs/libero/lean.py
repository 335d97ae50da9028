"""`env.render_profile=lean`: reduced meshes and textures for software rendering, with unchanged physics.

Only meshes of geoms without contacts (`contype = conaffinity = 0`, visual group) and image files of textures are
replaced; masses and inertias come from the collision group alone. Rendered images therefore differ slightly from the
published benchmark, but the dynamics do not.
"""

import contextlib
import io
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embodyrl.envs.meshes import decimate, get_reduced_copy, read_mesh

MAX_FACES = 2000
"""Maximum number of triangles per mesh; a scene of the benchmark has 70 to 110 meshes with up to 100 000 triangles."""

MAX_TEXTURE = 512
"""Maximum length in pixels of the longer side of a texture; the benchmark's textures have up to 4096 pixels."""


def reduce_visuals(xml: str) -> str:
    """Replace visual meshes and textures in a MuJoCo model with reduced copies, which are cached on disk.

    Raises:
        EnvError: the cache folder is not writable.
        MissingDependencyError: meshoptimizer is not installed.
    """
    root = ET.fromstring(xml)
    assets = root.find("asset")
    assert assets is not None, "a LIBERO model needs assets"
    physical = _get_physical_meshes(root)
    for mesh in assets.findall("mesh"):
        if mesh.get("name") not in physical and (file := mesh.get("file")):
            mesh.set("file", str(get_reduced_copy(Path(file), f"{MAX_FACES} faces", ".msh", _decimate_mesh)))
            # Thin decimated meshes may enclose no volume, which MuJoCo rejects even for unused meshes.
            mesh.set("inertia", "shell")
    for texture in assets.findall("texture"):
        if (file := texture.get("file")) and texture.get("gridsize") is None:
            texture.set("file", str(get_reduced_copy(Path(file), f"{MAX_TEXTURE} px", ".png", _shrink_texture)))
    return ET.tostring(root, encoding="unicode")


def remove_visuals(xml: str) -> str:
    """Return the model without textures, and with small spheres instead of visual meshes; the dynamics are the same.

    MuJoCo also computes bounding volumes of visual meshes in every step.
    """
    root = ET.fromstring(xml)
    assets = root.find("asset")
    assert assets is not None, "a LIBERO model needs assets"
    physical = _get_physical_meshes(root)
    for geom in root.iter("geom"):
        if geom.get("mesh") is not None and geom.get("mesh") not in physical:
            del geom.attrib["mesh"]
            geom.set("type", "sphere")
            geom.set("size", "0.0001")
    for mesh in assets.findall("mesh"):
        if mesh.get("name") not in physical:
            assets.remove(mesh)
    for material in assets.findall("material"):
        material.attrib.pop("texture", None)
    for texture in assets.findall("texture"):
        assets.remove(texture)
    return ET.tostring(root, encoding="unicode")


@contextlib.contextmanager
def use_lean_models(lean_xmls: list[str]) -> Iterator[None]:
    """Make robosuite build models without visuals in the `with` block; append the XML of lean models for rendering."""
    from robosuite.environments.base import MujocoEnv  # pyright: ignore[reportMissingImports]

    original = MujocoEnv._initialize_sim

    def initialize(self: Any, xml_string: str | None = None) -> None:
        lean_xmls.append(reduce_visuals(xml_string or self.model.get_xml()))
        original(self, remove_visuals(lean_xmls[-1]))

    MujocoEnv._initialize_sim = initialize
    try:
        yield
    finally:
        MujocoEnv._initialize_sim = original


def _get_physical_meshes(root: ET.Element) -> set[str]:
    """Return the names of meshes that are used for collisions or masses."""
    visual = {"group": "1", "contype": "0", "conaffinity": "0"}
    return {
        name
        for geom in root.iter("geom")
        if (name := geom.get("mesh")) is not None and any(geom.get(key) != value for key, value in visual.items())
    }


def _decimate_mesh(path: Path) -> bytes:
    return decimate(read_mesh(path), MAX_FACES).to_msh()


def _shrink_texture(path: Path) -> bytes:
    from PIL import Image, PngImagePlugin

    metadata = PngImagePlugin.PngInfo()
    with Image.open(path) as image:
        if "srgb" in image.info:  # MuJoCo decodes the colors of files with this chunk
            metadata.add(b"sRGB", bytes([image.info["srgb"]]))
        factor = min(1.0, MAX_TEXTURE / max(image.size))
        size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
        buffer = io.BytesIO()
        image.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(buffer, "PNG", pnginfo=metadata)
    return buffer.getvalue()
