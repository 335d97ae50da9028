"""What an actor beside a frozen model chooses: its keys and sizes, and what is kept of it. No torch."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from embodyrl.errors import CheckpointError
from embodyrl.policies.settings import WeightSettings
from embodyrl.policies.vla.records import TokenLayout
from embodyrl.types import PolicySpec

WIDTHS = (256, 256)
"""Hidden layers of the actor, and of the critics."""
SHAPE_FILE = "steering.json"
"""Beside saved weights."""


class ResidualSettings(WeightSettings):
    """A model that may be frozen and corrected: its own settings have a key `likelihood`."""

    needs = {"likelihood=residual": "residual_scale residual_repeated"}

    residual_scale: Annotated[float, Field(gt=0, le=10)] = 0.2
    """residual: a correction lies within -residual_scale..residual_scale, where the model's own actions span about
    -1..1."""
    residual_repeated: bool = False
    """residual: one row of corrections is chosen for all actions of a chunk, instead of each."""

    @property
    def corrects(self) -> bool:
        """The model is frozen, and what it proposes is corrected."""
        return self._chosen == "residual"

    @property
    def steers(self) -> bool:
        """The model is frozen, and an actor beside it learns."""
        return self.corrects

    @property
    def _chosen(self) -> str:
        likelihood: Any = getattr(self, "likelihood")  # noqa: B009  (each model has its own kinds)
        return str(likelihood)

    def problems(self) -> Iterator[str]:
        """What is frozen has no adapters."""
        yield from super().problems()
        if self.adapted and self.steers:
            yield (
                f"model.is_lora=true: model.likelihood={self._chosen} freezes the model, adapters with it; set it to "
                "false."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SteeringShape:
    """What the actor beside a frozen model reads and chooses."""

    features: int
    """F"""
    rows: int
    """Of chosen numbers; their log-probabilities stand at as many first actions of a chunk."""
    numbers: int
    """Of a row."""
    actions: int
    """K: executed actions of a chunk."""
    bound: float
    """What is chosen lies within -bound..bound."""
    proposes: bool
    """The last K A features are actions, and what is chosen is added to them."""

    @classmethod
    def correcting(cls, cfg: ResidualSettings, hidden: int, action_dim: int) -> "SteeringShape":
        """Corrections of proposed actions of A numbers, by an actor that reads `hidden` numbers beside them."""
        actions = cfg.num_action_chunks
        return cls(
            features=hidden + actions * action_dim,
            rows=1 if cfg.residual_repeated else actions,
            numbers=action_dim,
            actions=actions,
            bound=cfg.residual_scale,
            proposes=True,
        )

    def save(self, folder: Path) -> None:
        """Write `steering.json`, so that nobody acts with other bounds than were trained."""
        (folder / SHAPE_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def check(self, folder: Path) -> None:
        """Compare with the `steering.json` of a folder; of an actor of the other kind nothing would be read.

        Raises:
            CheckpointError: its actor chooses something else; names it.
        """
        path, mine = folder / SHAPE_FILE, asdict(self)
        saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else mine
        wrong = [
            f"{key} is {saved.get(key)}, this run needs {mine[key]}" for key in mine if saved.get(key) != mine[key]
        ]
        if wrong and saved.get("proposes") == self.proposes:
            keys = "residual_scale (bound) and residual_repeated" if self.proposes else "noise_bound and noise_repeated"
            raise CheckpointError(
                f"{path} does not fit: {', '.join(wrong)}. Use the model.num_action_chunks, {keys} of its training."
            )

    @property
    def width(self) -> int:
        """L: numbers that are chosen for a chunk."""
        return self.rows * self.numbers

    @property
    def layout(self) -> TokenLayout:
        """What is kept of a chunk: a seed, and what was chosen, before it is squashed."""
        return TokenLayout(whole=1, floats=self.width)


def steered(spec: PolicySpec, shape: SteeringShape, likelihood: str, *, beside: int = 0) -> PolicySpec:
    """The spec of a policy, with what changes where its model is frozen; `beside` the actor n weights learn."""
    widths = (shape.features, *WIDTHS, 2 * shape.width)
    actor = sum((a + 1) * b for a, b in pairwise(widths))
    return replace(
        spec,
        draws_with_gradients=True,
        scored=1,
        num_parameters=spec.num_parameters + actor,
        num_trained=actor + beside,
        steers=f"model.likelihood={likelihood}",
        corrects=shape.proposes,
        steering_features=shape.features,
    )
