"""Distributional value model of RECAP: categories over normalised returns, from images, state and instruction."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from embodyrl.extensions.demonstrations.reader import Demonstrations
from embodyrl.extensions.recap.targets import two_hot
from embodyrl.policies.flow.small.config import SmallConfig, Units
from embodyrl.policies.flow.small.network import SmallFlow
from embodyrl.policies.vla.records import ChunkShape
from embodyrl.types import DoubleArray, FloatArray, IntArray, Observation

BINS = 201
"""Number of categories, at linspace(-1, 0)."""
WIDTH, LAYERS, PLANES, MAPS = 64, 2, (16, 32), 16
MAX_EDGE = 64
"""Maximum side of an image in pixels; larger images are averaged over squares of pixels."""
_RATED_AT_A_TIME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTraining:
    """Length and speed of the training of one value model."""

    steps: int
    batch_size: int
    lr: float
    seed: int


class ValueModel(nn.Module):
    """Encoder of the small flow policy, which reads images, state and instruction, with a head for `BINS` logits."""

    def __init__(self, demos: Demonstrations) -> None:
        super().__init__()
        cameras, state = demos.images.shape[1], demos.state.shape[1]
        bounds = np.quantile(demos.state, (0.01, 0.99), axis=0).astype(np.float32)
        one = np.ones(1, np.float32)
        units = Units(action_low=-one, action_high=one, state_low=bounds[0], state_high=bounds[1])
        sizes = SmallConfig(
            width=WIDTH, layers=LAYERS, planes=PLANES, maps=MAPS, num_images=cameras, state_dim=state, action_width=1
        )
        shape = ChunkShape(horizon=1, width=1, executed=1, action_dim=1)
        longest = max(len(str(text).split()) for text in set(demos.instruction.tolist()))
        self.network = SmallFlow(sizes, shape, units, words=longest)
        self.head = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, BINS))

    def forward(self, obs: Observation) -> Tensor:
        """Return logits [B, BINS]."""
        return self.head(self.network.encode_prefix(obs).pooled)

    def expected(self, logits: Tensor) -> Tensor:
        """Return the expected return [B] of logits [B, BINS]."""
        return logits.softmax(1) @ torch.linspace(-1.0, 0.0, BINS, device=logits.device)


def shrunk(images: np.ndarray) -> np.ndarray:
    """Average images [N, C, H, W, 3] over squares, so that no side exceeds `MAX_EDGE`; smaller ones are unchanged."""
    height, width = images.shape[2:4]
    by = max(1, math.ceil(max(height, width) / MAX_EDGE))
    if by == 1 or not images.size:
        return images
    rows, columns = height // by, width // by
    out = np.empty((*images.shape[:2], rows, columns, 3), np.uint8)
    for place, frame in enumerate(images):  # one frame at a time: the mean is a float array
        squares = frame[:, : rows * by, : columns * by].reshape(-1, rows, by, columns, by, 3)
        out[place] = squares.mean(axis=(2, 4)).round()
    return out


def train_value(demos: Demonstrations, steps: IntArray, g: DoubleArray, training: ValueTraining) -> ValueModel:
    """Train a value model on frames `steps` with returns g [N] by cross-entropy to two-hot targets."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        model = ValueModel(demos).to(device)
    used = [weight for name, weight in model.named_parameters() if not _of_actions(name)]
    optimizer = torch.optim.AdamW(used, lr=training.lr, weight_decay=0.01)
    rng = np.random.default_rng(training.seed)
    for step in range(training.steps):
        progress = step / training.steps
        for group in optimizer.param_groups:
            group["lr"] = training.lr * min(1.0, (step + 1) / 20) * 0.5 * (1.0 + math.cos(math.pi * progress))
        rows = rng.choice(steps, training.batch_size)
        target = torch.from_numpy(two_hot(g[rows], BINS)).to(device, torch.float32)
        loss = nn.functional.cross_entropy(model(observations(demos, rows)), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(used, 1.0)
        optimizer.step()
    return model.eval()


def _of_actions(name: str) -> bool:
    """Return whether a weight belongs to the action expert, which a value model does not use."""
    parts = ("memory", "action_in", "time", "expert", "out_norm", "action_out")
    return name.startswith(tuple(f"network.{part}" for part in parts))


@torch.no_grad()
def rate(model: ValueModel, demos: Demonstrations, steps: IntArray) -> DoubleArray:
    """Return the values of frames `steps` [n]."""
    parts = [
        model.expected(model(observations(demos, steps[i : i + _RATED_AT_A_TIME]))).double().cpu().numpy()
        for i in range(0, len(steps), _RATED_AT_A_TIME)
    ]
    return np.concatenate([np.zeros(0), *parts])


def observations(demos: Demonstrations, steps: IntArray) -> Observation:
    """Return the observations of some frames."""
    state: FloatArray = demos.state[steps]
    words = tuple(str(text) for text in demos.instruction[steps])
    return Observation(images=demos.images[steps], state=state, instructions=words)
