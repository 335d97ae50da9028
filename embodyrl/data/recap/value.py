"""Distributional value models of RECAP: a categorical distribution over normalised returns."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from embodyrl.data.reader import Demonstrations
from embodyrl.data.recap.targets import two_hot
from embodyrl.errors import NonFiniteError
from embodyrl.policies.vla.conditioning import HasFeatures
from embodyrl.types import ROWS_AT_A_TIME, DoubleArray, IntArray, Observation

BINS = 201
"""Number of categories; their returns are linspace(-1, 0, BINS)."""
HEAD_WIDTH, DROPOUT = 128, 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTraining:
    """Optimizer steps, batch size and learning rate for one value model."""

    steps: int
    batch_size: int
    lr: float
    seed: int


class ValueModel(nn.Module):
    """MLP that predicts logits over `BINS` categories of the return from normalised features [N, F] of all frames."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        scale = features.std(0) + 1e-3
        self._features = (features - features.mean(0)) / scale
        layers: list[nn.Module] = []
        for inputs in (features.shape[1], HEAD_WIDTH):
            layers += [nn.Linear(inputs, HEAD_WIDTH), nn.GELU(), nn.Dropout(DROPOUT)]
        self.layers = nn.Sequential(*layers, nn.Linear(HEAD_WIDTH, BINS))

    def forward(self, frames: IntArray) -> Tensor:
        """Return the logits [B, BINS] of the frames with the indices `frames` [B]."""
        return self.layers(self._features[torch.from_numpy(frames).to(self._features.device)])


def compute_features(policy: HasFeatures, demos: Demonstrations) -> Tensor:
    """Return the policy's features of all frames, concatenated with the state: [N, F]."""
    parts: list[Tensor] = []
    for start in range(0, len(demos.action), ROWS_AT_A_TIME):
        obs = observations(demos, np.arange(start, min(start + ROWS_AT_A_TIME, len(demos.action))))
        features = policy.features(obs).float()
        parts.append(torch.cat([features, torch.from_numpy(obs.state).to(features)], 1))
    return torch.cat(parts)


def train_value(
    build_model: Callable[[], ValueModel], frames: IntArray, g: DoubleArray, training: ValueTraining
) -> ValueModel:
    """Train a value model on selected frames, with cross-entropy between its distribution and the two-hot returns.

    Args:
        build_model: function that builds a value model.
        frames: [n] indices of the training frames.
        g: [N] normalised return of every frame.
        training: settings of the training.

    Raises:
        NonFiniteError: the gradient is not finite.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        model = build_model().train()
        parameters = [*model.parameters()]
        device = parameters[0].device
        optimizer = torch.optim.AdamW(parameters, lr=training.lr, weight_decay=0.1)
        rng = np.random.default_rng(training.seed)
        for step in range(training.steps):
            share = 0.5 * (1.0 + math.cos(math.pi * step / training.steps))
            for group in optimizer.param_groups:
                group["lr"] = training.lr * min(1.0, (step + 1) / 20) * share
            rows = rng.choice(frames, training.batch_size)
            target = torch.from_numpy(two_hot(g[rows], BINS)).to(device, torch.float32)
            loss = nn.functional.cross_entropy(model(rows), target)
            optimizer.zero_grad()
            loss.backward()
            if not (norm := nn.utils.clip_grad_norm_(parameters, 1.0)).isfinite():
                raise NonFiniteError(
                    f"Non-finite gradient norm {norm.item()} of a value model in optimizer step {step + 1}; the policy "
                    f"is unchanged, and no labels were written. Lower recap.value_lr."
                )
            optimizer.step()
    return model.eval()


@torch.no_grad()
def rate(model: ValueModel, frames: IntArray) -> DoubleArray:
    """Return the predicted value [n] of the frames with the indices `frames` [n].

    The value is the mean of the predicted return distribution.
    """
    parts = [np.zeros(0)]
    for start in range(0, len(frames), 256):
        logits = model(frames[start : start + 256])
        centres = torch.linspace(-1.0, 0.0, BINS, device=logits.device)
        parts.append((logits.softmax(1) @ centres).double().cpu().numpy())
    return np.concatenate(parts)


def observations(demos: Demonstrations, frames: IntArray) -> Observation:
    """Return the observations of the frames with the indices `frames`."""
    instructions = tuple(str(text) for text in demos.instruction[frames])
    return Observation(images=demos.images[frames], state=demos.state[frames], instructions=instructions)
