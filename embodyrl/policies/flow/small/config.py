"""What a folder of a small flow policy says about its weights. No torch."""

import json
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from embodyrl.errors import CheckpointError

CONFIG_FILE = "config.json"
RANDOM_INIT_KEY = "embodyrl_init"
"""config.json of a folder without weights says {"embodyrl_init": "random"}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallConfig:
    """Sizes of `SmallFlow`."""

    width: int = 128
    layers: int = 3
    heads: int = 4
    planes: tuple[int, ...] = (32, 64)
    """Channels of the convolutions, each of which halves the image."""
    maps: int = 32
    """Feature maps whose places are read."""
    vocabulary: int = 512
    """Words are hashed to so many ids."""
    num_images: int = 0
    state_dim: int = 0
    action_width: int = 0
    """A"""

    @classmethod
    def read(cls, folder: Path | None) -> tuple[Self, bool]:
        """Read `config.json`, and whether the folder has no weights; without a folder the defaults.

        Raises:
            CheckpointError: the file is missing or malformed.
        """
        if folder is None:
            return cls(), True
        path = folder / CONFIG_FILE
        try:
            saved: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
            random = saved.pop(RANDOM_INIT_KEY, None) == "random"
            if unknown := saved.keys() - {f.name for f in fields(cls)}:
                raise ValueError(f"unknown keys {', '.join(sorted(unknown))}")
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); it wants a small flow policy's folder.") from error
        saved["planes"] = tuple(saved.get("planes", cls().planes))
        return cls(**saved), random

    def save(self, folder: Path) -> None:
        """Write `config.json`."""
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @property
    def num_parameters(self) -> int:
        """All weights and biases of the network."""
        w = self.width
        attention, mlp = w * 3 * w + 3 * w + w * w + w, 6 * w * w + 4 * w
        blocks = self.layers * (2 * (attention + mlp) + 4 * w + w * 6 * w + 6 * w)
        last, seen = self.planes[-1], 0
        if self.num_images:
            seen = sum((25 if a == 3 else 9) * a * b + b for a, b in pairwise((3, *self.planes)))
            seen += 9 * last * last + 5 * last + (w + 1) * 4 * last
            seen += (last + 1) * self.maps + (2 * self.maps + 1) * w + self.num_images * w
        state = self.state_dim * w + w if self.state_dim else 0
        around = self.vocabulary * w + (w + 1) * 2 * w * self.layers + 2 * (w * w + w) + 2 * 2 * w
        return blocks + seen + state + around + self.action_width * w + w + w * self.action_width + self.action_width
