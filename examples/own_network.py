"""A network of your own, for `embodyrl new policy my_policy`. See docs/tutorials/own_policy.md."""

import torch
from torch import nn

BINS = 11  # as in the generated policy.py


class Net(nn.Module):
    """MLP on the state and on all pairwise differences of its components."""

    def __init__(self, env, spec, width):
        super().__init__()
        pairs = env.state_dim * (env.state_dim - 1) // 2
        self.index = torch.triu_indices(env.state_dim, env.state_dim, 1)
        self.body = nn.Sequential(
            nn.Linear(env.state_dim + pairs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.logits = nn.Linear(width, spec.tokens_per_chunk * BINS)
        self.value_head = nn.Linear(width, spec.value_dim) if spec.value_dim else None

    def forward(self, images, state, task):
        first, second = self.index
        hidden = self.body(torch.cat([state, state[:, first] - state[:, second]], dim=1))
        value = hidden.new_zeros(len(hidden), 0) if self.value_head is None else self.value_head(hidden)
        return self.logits(hidden).unflatten(1, (-1, BINS)), value
