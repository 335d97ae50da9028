"""Moving average of the trained weights, with which rollouts act."""

from pathlib import Path

import torch

from embodyrl.checkpoint.tensors import load_state, save_state
from embodyrl.learners.training import Trainer
from embodyrl.policies.protocol import mark_weights_changed

TRAINED = "trained"
"""Name of the checkpoint file with the trained weights, if rollouts use averaged weights."""


class WeightAverage:
    """Exponential moving average (EMA) of the trained weights; the policy has the average except during updates."""

    def __init__(self, trainer: Trainer, decay: float) -> None:
        """Start the average from the weights of the policy; decay 0: no averaging."""
        self._module, self._ranks, self._decay = trainer.policy.module, trainer.ranks, decay
        trained = {name: w for name, w in self._module.named_parameters() if w.requires_grad}
        self._weights = trained if decay else {}
        # Weights that the module does not contain: the average during an update, else the trained weights.
        self._swapped_weights = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def swap(self) -> None:
        """Swap the policy's weights with the stored weights, which are either the average or the trained weights."""
        for name, weight in self._weights.items():
            copy = weight.clone()
            weight.copy_(self._swapped_weights[name])
            self._swapped_weights[name] = copy
        if self._weights:
            mark_weights_changed(self._module)

    @torch.no_grad()
    def add(self) -> None:
        """Add the trained weights, which the policy has during an update, to the average."""
        for name, weight in self._weights.items():
            self._swapped_weights[name].lerp_(weight, 1 - self._decay)

    def save(self, folder: Path) -> None:
        """Save the trained weights if rollouts use averaged weights."""
        # Gathering is collective, but only rank 0 writes.
        trained = self._ranks.gather(self._swapped_weights)
        if trained and not self._ranks.rank_info.rank:
            save_state(folder, TRAINED, trained)

    def load(self, folder: Path) -> None:
        """Restore the trained weights; if none are saved, training continues from the weights of the policy."""
        self._ranks.shard_weights()
        self._swapped_weights = {name: weight.detach().clone() for name, weight in self._weights.items()}
        if self._weights and (folder / f"{TRAINED}.json").is_file():
            trained = load_state(folder, TRAINED)
            # Load the trained weights through the module, which shards them; `swap` restores the average afterwards.
            with self._ranks.full_weights(write=True), torch.no_grad():
                for name, weight in self._module.named_parameters():
                    if name in trained:
                        weight.copy_(trained[name])
            self._ranks.shard_weights()
            self.swap()
        self._ranks.reshard()
