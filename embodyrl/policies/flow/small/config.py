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
    stem: tuple[int, ...] = (32, 64, 96)
    """Channels of the convolutions; one more gives `width`. Each halves the image."""
    vocabulary: int = 512
    """Words are hashed to so many ids."""
    prediction: str = "velocity"
    """What the last layer gives: the velocity, or the clean chunk."""
    num_images: int = 0
    state_dim: int = 0
    action_width: int = 0
    """D: numbers of an action that are not constant."""

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
        saved["stem"] = tuple(saved.get("stem", cls().stem))
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
        planes = (3, *self.stem, w) if self.num_images else ()
        seen = sum(9 * a * b + b for a, b in pairwise(planes)) + self.num_images * w + (2 * w if planes else 0)
        state = self.state_dim * w + w if self.state_dim else 0
        around = self.vocabulary * w + (w + 1) * 2 * w * self.layers + 2 * (w * w + w) + 2 * 2 * w
        return blocks + seen + state + around + self.action_width * w + w + w * self.action_width + self.action_width
