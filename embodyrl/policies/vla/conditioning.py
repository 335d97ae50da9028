"""Advantage conditioning: instruction suffix, and weight of classifier-free guidance. Does not import torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from embodyrl.errors import CheckpointError, format_reason
from embodyrl.files import read_json
from embodyrl.policies.protocol import Policy
from embodyrl.types import Observation

if TYPE_CHECKING:
    from torch import Tensor

CONDITIONING_FILE = "advantage.json"
"""File name of the conditioning in the folder of a policy that acts with a suffix."""
POSITIVE, NEGATIVE = "Advantage: positive", "Advantage: negative"
"""Instruction suffixes for positive and negative advantages (RECAP, arXiv 2511.14759)."""


def add_suffix(instruction: str, suffix: str) -> str:
    """Return an instruction with exactly one suffix, on a separate line; an earlier suffix is replaced."""
    text = instruction.rstrip()
    for known in (POSITIVE, NEGATIVE):
        text = text.removesuffix(known).rstrip()
    return f"{text}\n{suffix}" if suffix else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """Instruction suffix and guidance weight for acting: output = null + guidance * (conditioned - null).

    `conditioned` is the output for instructions with the suffix, `null` without. Guidance 0 is the policy without the
    suffix; 1 is the policy with the suffix, in one pass.
    """

    suffix: str
    guidance: float

    def conditioned(self, obs: Observation) -> Observation:
        """Return observations whose instructions have the suffix."""
        return _replace_suffix(obs, self.suffix)

    def null(self, obs: Observation) -> Observation:
        """Return observations whose instructions have no suffix."""
        return _replace_suffix(obs, "")

    def save(self, folder: Path) -> None:
        """Write suffix and guidance into `CONDITIONING_FILE` of a policy's folder."""
        (folder / CONDITIONING_FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def _replace_suffix(obs: Observation, suffix: str) -> Observation:
    return replace(obs, instructions=tuple(add_suffix(text, suffix) for text in obs.instructions))


def read_conditioning(folder: Path) -> Conditioning | None:
    """Read the conditioning of a policy; None: the policy acts without an instruction suffix.

    Raises:
        CheckpointError: the file is malformed.
    """
    path = folder / CONDITIONING_FILE
    try:
        conditioning = Conditioning(**read_json(path))
        valid = conditioning.suffix in (POSITIVE, NEGATIVE) and 0 <= float(conditioning.guidance) < 1000
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({format_reason(error)}). Export the policy again.") from error
    if not valid:
        raise CheckpointError(
            f"{path} contains {conditioning}, expected a known suffix and guidance. Export the policy again."
        )
    return conditioning


@runtime_checkable
class HasFeatures(Policy, Protocol):
    """Interface of a policy whose features of an observation can be the input of a value model."""

    def features(self, obs: Observation) -> Tensor:
        """Return features [B, F] of observations, without gradients."""
        ...


@runtime_checkable
class Conditioned(Policy, Protocol):
    """Interface of a policy that can act with an instruction suffix. `imitate` uses instructions as given."""

    conditioning: Conditioning | None
