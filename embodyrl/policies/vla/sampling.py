"""Batch-independent random numbers for action chunks, and the tokens of a sampled chunk.

Noise is a counter-based function of the uniform numbers that the run generates for a chunk of an episode. A chunk
needs many more normal numbers than its tokens store, and training needs some of the numbers again. Therefore Philox
(Salmon et al. 2011) generates the numbers from a 48-bit seed, which is derived from the uniform numbers of the run.
"""

import zlib
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from embodyrl.policies.tensors import to_device
from embodyrl.types import FloatArray, IntArray, Observation, PolicyOutput, PolicyScores, PolicySpec

START, STEP_INDEX, PAIRS, TIMES, STEP = range(5)
"""Ids of random streams: initial noise (START), index of the stochastic step (STEP_INDEX), noise and times of the pairs
of FPO (PAIRS, TIMES), and noise of step i (STEP + i)."""


def get_seeds(noise: FloatArray) -> IntArray:
    """Return a 48-bit seed for each row of random numbers [B, L >= 2] in [0, 1).

    The first two numbers of a row contribute 24 bits each.
    """
    # Exact: sample_uniforms of 24 bits are integer multiples of 2^-24, in float64 as well.
    bits = (noise[:, :2].astype(np.float64) * 2**24).astype(np.int64)
    return bits[:, 0] << 24 | bits[:, 1]


def get_observation_seeds(obs: Observation) -> IntArray:
    """Return seeds [B] that depend only on each observation, not on the batch or the process."""
    pairs = zip(obs.images, obs.state, strict=True)
    return np.array([zlib.crc32(image.tobytes() + state.tobytes()) for image, state in pairs], np.int64)


def sample_uniforms(seeds: IntArray, stream: int, count: int) -> np.ndarray:
    """Return uniform random numbers [B, count], float64, strictly between 0 and 1."""
    philox = np.random.Philox(key=0)
    state = cast(Any, philox.state)
    out = np.empty((len(seeds), count))
    for row, seed in enumerate(seeds.tolist()):
        state["state"]["key"][:] = seed, stream
        philox.state = state
        # Raw numbers are the same in every version of numpy.
        out[row] = (philox.random_raw(count) >> np.uint64(11)).astype(np.float64)
    return (out + 0.5) * 2.0**-53


def sample_normals(seeds: IntArray, stream: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return standard normal numbers [B, *shape], float32; the same on every device."""
    flat = sample_uniforms(seeds, stream, int(np.prod(shape)))
    return to_device(torch.special.ndtri(torch.from_numpy(flat)).float(), device).unflatten(1, shape)


def sample_training_noise(count: int, size: tuple[int, ...], device: torch.device) -> tuple[Tensor, np.ndarray]:
    """Return normal noise [B, *size] and uniform numbers [B] of B = `count` samples for an SFT loss.

    Without gradients (validation), the numbers are the same in every call.
    """
    seeds = torch.randint(2**47, (count,)).numpy() if torch.is_grad_enabled() else np.arange(count)
    return sample_normals(seeds, START, size, device), sample_uniforms(seeds, TIMES, 1)[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledChunks:
    """Action chunks sampled for B observations, with the tokens from which their log-probabilities are recomputed."""

    state: Tensor
    """[B, H, D] state at t = 0; or the sample of an actor for a frozen model (see `SteeringActor`)."""
    tokens: IntArray
    """[B, T] tokens in the layout of `ChunkRecord`, or of the head."""
    logprob: Tensor
    """[B, K, P] log-probabilities."""

    @classmethod
    def from_greedy(cls, state: Tensor) -> Self:
        """Create a `SampledChunks` from greedy chunks [B, H, D], with empty tokens and log-probabilities."""
        empty = torch.zeros(len(state), 1, 0, device=state.device)
        return cls(state=state, tokens=np.zeros((len(state), 0), np.int64), logprob=empty)

    def to_output(
        self, actions: FloatArray, value: Tensor, spec: PolicySpec, varying: IntArray | None = None
    ) -> PolicyOutput:
        """Return the output of a policy, with tokens and log-probabilities [B, L] padded with zeros.

        `varying` contains the indices of action dimensions with log-probabilities; None: all dimensions.
        """
        tokens = np.zeros((len(self.tokens), spec.tokens_per_chunk), np.int64)
        tokens[:, : self.tokens.shape[1]] = self.tokens
        logprob = pad_per_action(self.logprob, spec, varying).cpu().numpy()
        return PolicyOutput(actions=actions, tokens=tokens, logprob=logprob, value=value.cpu().numpy())


def build_scores(
    scores: tuple[Tensor, Tensor], value: Tensor, spec: PolicySpec, varying: IntArray | None = None
) -> PolicyScores:
    """Return log-probabilities and entropies [B, K, P] as scores [B, L] (see `SampledChunks.to_output`)."""
    logprob, entropy = (pad_per_action(part, spec, varying) for part in scores)
    return PolicyScores(logprob=logprob, entropy=entropy, value=value)


def pad_per_action(numbers: Tensor, spec: PolicySpec, varying: IntArray | None) -> Tensor:
    """Return values [B, L]: the P values of each action [B, K, P], padded with 0 to the action's number of tokens."""
    if varying is not None and numbers.shape[2]:
        numbers = numbers[..., varying]
    tokens_per_action = spec.tokens_per_chunk // numbers.shape[1]
    return torch.nn.functional.pad(numbers, (0, tokens_per_action - numbers.shape[2])).flatten(1)


def get_varying_dimensions(varying_mask: FloatArray) -> IntArray:
    """Return the indices of the action dimensions that vary in the data, or all indices if none varies.

    Noise has no effect on constant dimensions, so they have no log-probability.
    """
    return np.flatnonzero(varying_mask) if varying_mask.any() else np.arange(len(varying_mask))
