"""Config keys, sizes and token layout of an actor for a frozen model. Does not import torch."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from embodyrl.errors import reject_malformed
from embodyrl.files import read_json
from embodyrl.policies.files import check_equal
from embodyrl.policies.settings import WeightSettings
from embodyrl.policies.vla.records import TokenLayout
from embodyrl.types import PolicyCosts, PolicySpec, SteeringSpec

WIDTHS = (256, 256)
"""Widths of the hidden layers of the actor and the critics."""
SHAPE_FILE = "steering.json"
"""Name of the file with the actor's shape in a folder of weights."""


class ResidualSettings(WeightSettings):
    """Config keys for residual policies; subclasses declare the key `likelihood`."""

    keys_by_condition = {"likelihood=residual": "residual_scale residual_repeated"}

    residual_scale: Annotated[float, Field(gt=0, le=10)] = 0.2
    """With likelihood=residual: bound of a correction, in units of the model's normalized actions (-1..1)."""
    residual_repeated: bool = False
    """With likelihood=residual: one correction for all actions of a chunk; false: one correction per action."""

    @property
    def is_residual(self) -> bool:
        """True if the model is frozen and its actions are corrected."""
        return self.likelihood_name == "residual"

    @property
    def is_steered(self) -> bool:
        """True if the model is frozen and an actor is trained."""
        return self.likelihood_name in ("dsrl", "residual")

    @property
    def likelihood_name(self) -> str:
        """Value of the key `likelihood`; the allowed values depend on the model."""
        likelihood: Any = getattr(self, "likelihood")  # noqa: B009
        return str(likelihood)

    def problems(self) -> Iterator[str]:
        """Yield errors of adapter keys, which a frozen model does not support."""
        yield from super().problems()
        if self.trains_adapters and self.is_steered:
            yield (
                f"model.is_lora=true: model.likelihood={self.likelihood_name} freezes the model including adapters; "
                "set model.is_lora=false."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SteeringShape:
    """Input and output sizes of the actor for a frozen model."""

    features: int
    """F: number of features."""
    rows: int
    """Number of output rows: one per executed action (K), or one for the whole chunk. The log-probability of row i is
    stored at action i."""
    numbers: int
    """Number of outputs per row."""
    actions: int
    """K: number of executed actions per chunk."""
    bound: float
    """Bound of the outputs: -bound..bound."""
    proposes: bool
    """True if the last K * A features are proposed actions, to which the outputs are added as corrections."""

    @classmethod
    def for_residual(cls, cfg: ResidualSettings, hidden: int, action_dim: int) -> "SteeringShape":
        """Return the shape of an actor that corrects actions; `hidden` is the number of further input features."""
        actions = cfg.num_action_chunks
        return cls(
            features=hidden + actions * action_dim,
            rows=1 if cfg.residual_repeated else actions,
            numbers=action_dim,
            actions=actions,
            bound=cfg.residual_scale,
            proposes=True,
        )

    @classmethod
    def for_noise(cls, hidden: int, numbers: int, *, actions: int, bound: float) -> "SteeringShape":
        """Return the shape of a DSRL actor that outputs `numbers` values per chunk, used as noise or as a latent."""
        return cls(features=hidden, rows=1, numbers=numbers, actions=actions, bound=bound, proposes=False)

    def save(self, folder: Path) -> None:
        """Write `steering.json`, so that inference uses the bounds of training."""
        (folder / SHAPE_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def check(self, folder: Path) -> None:
        """Check that the shape matches the `steering.json` of a folder.

        Raises:
            CheckpointError: the file is malformed, or the actor has other outputs; the message contains the difference.
        """
        saved = _read_shape(folder)
        if saved.get("proposes") == self.proposes:
            keys = "residual_scale (bound) and residual_repeated" if self.proposes else "noise_bound and noise_repeated"
            fix = f"Set model.num_action_chunks, {keys} to the values with which the checkpoint was trained."
            check_equal(saved, asdict(self), folder / SHAPE_FILE, fix)

    @property
    def width(self) -> int:
        """L: number of actor outputs per chunk."""
        return self.rows * self.numbers

    @property
    def layout(self) -> TokenLayout:
        """Token layout of a sampled chunk: a seed, and the actor's sample before squashing."""
        return TokenLayout(integers=1, floats=self.width)

    @property
    def tokens(self) -> int:
        """Number of tokens of a chunk: a multiple of K."""
        return self.actions * -(-self.layout.tokens // self.actions)


def _read_shape(folder: Path) -> dict[str, Any]:
    """Return the fields in the `steering.json` of a folder, or an empty dict if the folder has no actor."""
    path = folder / SHAPE_FILE
    with reject_malformed(path, "Download the checkpoint again."):
        return dict(read_json(path).items()) if path.is_file() else {}


def add_steering(
    spec: PolicySpec, shape: SteeringShape | None, cfg: ResidualSettings, folder: Path | None
) -> PolicySpec:
    """Return the spec with the tokens of the actor, and a warning if the actor in `folder` is not used.

    Raises:
        CheckpointError: the folder has an actor with other outputs, or a malformed `steering.json`.
    """
    saved = {} if folder is None else _read_shape(folder)
    if saved and (shape is None or saved.get("proposes") != shape.proposes):
        kind = "residual" if saved.get("proposes") else "dsrl"
        warning = (
            f"the checkpoint contains an actor that was trained with model.likelihood={kind} ({SHAPE_FILE}), but "
            f"model.likelihood={cfg.likelihood_name} does not use the actor"
        )
        spec = replace(spec, warnings=(*spec.warnings, warning))
    if shape is None:
        return spec
    if folder is not None:
        shape.check(folder)
    steering = SteeringSpec(key=f"model.likelihood={cfg.likelihood_name}", is_residual=shape.proposes)
    return replace(spec, differentiable=True, tokens_per_chunk=shape.tokens, scored=1, steering=steering)


def add_steering_costs(costs: PolicyCosts, shape: SteeringShape | None, *, num_other_trained: int = 0) -> PolicyCosts:
    """Add the costs of the actor to the costs of the frozen model; without an actor, return the same costs.

    `num_other_trained` is the number of trained weights outside the actor.
    """
    if shape is None:
        return costs
    actor = sum((a + 1) * b for a, b in pairwise((shape.features, *WIDTHS, 2 * shape.width)))
    return replace(
        costs,
        num_parameters=costs.num_parameters + actor,
        num_trained=actor + num_other_trained,
        # The frozen model stores no activations for a backward pass.
        activation_bytes=costs.inference_bytes,
        recomputed_bytes=costs.inference_bytes,
        steering_features=shape.features,
    )
