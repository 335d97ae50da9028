"""One whole PPO update of small networks against Stable-Baselines3."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodyrl.algorithms.estimators import whiten
from embodyrl.algorithms.metrics import compute_metrics
from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.protocol import LossInputs
from embodyrl.learners.training import Optimization
from embodyrl.plan.config import load_config
from embodyrl.policies.actor_critic.policy import ActorCritic
from embodyrl.policies.actor_critic.shape import NetShape
from embodyrl.types import ActionKind, PolicyScores, PreparedBatch

N, S, A = 12, 3, 2
WORDS = (
    *("env=gym", "env.id=BipedalWalker-v3", "model=mlp", "algorithm=ppo", "algorithm.entropy_bonus=0.01"),
    # Half the squared error is weighed, there the whole one.
    *("algorithm.value_coef=1", "actor.optim.clip_grad=0.5", "actor.optim.value_clip_grad=null"),
    *("actor.optim.lr=0.01", "actor.optim.value_lr=0.01"),
)


def filled(shape: tuple[int, ...], phase: float) -> torch.Tensor:
    count = int(np.prod(shape))
    return torch.from_numpy((0.5 * np.sin(np.arange(count) * 1.7 + phase)).reshape(shape).astype(np.float32))


def weighed(part: torch.Tensor) -> float:
    """Return one number that changes with any element."""
    return float((part.detach().double() * torch.arange(part.numel()).reshape(part.shape).double().cos()).sum())


def test_ppo_update_matches_stable_baselines3():
    """Values of stable_baselines3 2.9.2, PPO.train() with these weights and this batch, in one mini-batch."""
    cfg = load_config("train", list(WORDS))
    shape = NetShape(
        state_dim=S, num_images=0, image_size=(0, 0), action_kind=ActionKind.box, sizes=(), low=(-1.0,) * A,
        high=(1.0,) * A, num_actions=1, hidden=(8, 8), value_dim=1,
    )  # fmt: skip
    net, algorithm = ActorCritic(shape, 0, -0.5), Algorithm(cfg.algorithm)
    assert net.value_head is not None
    layers = [m for part in (net.policy, net.value_head) for m in part if isinstance(m, torch.nn.Linear)]
    for k, layer in enumerate(layers):
        layer.weight.data.copy_(filled(tuple(layer.weight.shape), k))
        layer.bias.data.copy_(filled(tuple(layer.bias.shape), k + 10))
    features = 2 * filled((N, S), 20)
    choice = (1.5 * filled((N, A), 21))[:, None]
    advantage, returns = 3 * filled((N,), 22).numpy(), 2 * filled((N, 1), 23)
    logprob, entropy = net.head.score(net.outputs(features), choice, 1.0)
    logprob, entropy, value = logprob.flatten(1), entropy.flatten(1), net.value(features)
    batch = PreparedBatch(
        records=np.arange(N),
        episode=np.zeros(N, np.int64),
        advantage=whiten(advantage).astype(np.float32)[:, None],
        returns=returns.numpy(),
        valid=np.ones((N, 1), np.bool_),
        has_signal=True,
    )
    weights = algorithm.weights(batch, range(N))
    inputs = LossInputs(
        old_logprob=logprob.detach() + filled((N, A), 24) / 2,
        ref_logprob=None,
        advantage=torch.from_numpy(batch.advantage),
        returns=returns,
        old_value=value.detach(),
        valid=torch.from_numpy(batch.valid),
        weight=torch.from_numpy(weights.policy),
        value_weight=torch.from_numpy(weights.value),
        positive_weight=torch.from_numpy(weights.positive),
    )
    loss, measured = algorithm.loss(PolicyScores(logprob=logprob, entropy=entropy, value=value), inputs)
    loss.backward()
    Optimization(net, cfg.actor.optim, 1).step(0.0)
    (metrics,) = compute_metrics([measured])
    found = [loss.item(), *(metrics[name] for name in ("policy_loss", "entropy", "kl"))]
    assert found == pytest.approx(LOSSES, abs=1e-5)
    assert [weighed(layer.weight) for layer in layers] == pytest.approx(WEIGHTS, abs=1e-5)
    assert net.state_dict()["head.log_std"].tolist() == pytest.approx(LOG_STD, abs=1e-5)


LOSSES = [0.3653455, 0.0264461, 1.8378772, 0.0276748]
WEIGHTS = [0.5335484, 0.8243382, -0.4281304, -0.5055873, -0.5877874, -0.0271487]
LOG_STD = [-0.5099995, -0.4900021]
