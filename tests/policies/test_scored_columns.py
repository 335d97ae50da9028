"""Each registered policy declares which record columns have a log-probability; the other columns are 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import Observation
from embodyrl.workers.noise import generate_token_noise

TABLE, PENDULUM, TEXT = ("env=tabletop",), ("env=gym", "env.id=Pendulum-v1"), ("env=text/copy",)
CASES = {
    "mlp": (*PENDULUM, "model=mlp"),
    "mlp squashed": (*PENDULUM, "model=mlp", "model.squashed=true", "algorithm=sac"),
    "cnn": (*TABLE, "model=cnn"),
    "flow_small": (*TABLE, "model=flow_small"),
    "flow_small fpo": (*TABLE, "model=flow_small", "model.likelihood=fpo"),
    "flow_small residual": (*TABLE, "model=flow_small", "model.likelihood=residual", "algorithm=sac"),
    "pi05": (*TABLE, "model=pi05_tiny"),
    "smolvla": (*TABLE, "model=smolvla_tiny"),
    "act": (*TABLE, "model=act"),
    "diffusion": (*TABLE, "model=diffusion"),
    "diffusion steered": (*TABLE, "model=diffusion", "model.likelihood=dsrl", "algorithm=sac"),
    "openvla_oft": (*TABLE, "model=openvla_oft_tiny"),
    "causal_lm_tiny": (*TEXT, "model=causal_lm_tiny"),
    "vision_lm_tiny": ("env=text/colour", "model=vision_lm_tiny"),
}
SAME_CODE = {"pi0": "pi05", "openvla": "openvla_oft", "causal_lm": "causal_lm_tiny", "vision_lm": "vision_lm_tiny"}
"""Models with the policy class of a case, for weights that are not part of this project."""
WITHOUT_SCORES = {"random", "scripted", "remote", "lerobot"}
"""Policies that are not trained."""

CONSTANT = {"pi05": 4, "smolvla": 4}
"""Number of action dimensions that are constant in the statistics of a model: no columns belong to them."""


def test_every_registered_policy_has_a_test_case() -> None:
    assert {case.partition(" ")[0] for case in CASES} | set(SAME_CODE) | WITHOUT_SCORES == set(POLICIES.names())


@pytest.mark.parametrize("case", CASES)
def test_only_columns_of_the_spec_have_log_probs(case: str) -> None:
    run_plan = build_run_plan(load_config("train", [*CASES[case], "launcher=inline"]), training=True)
    env = run_plan.env
    policy = POLICIES.get(run_plan.cfg.model.model_type).build(
        run_plan.cfg.model, PolicyRequest(env=env, device="cpu", seed=0)
    )
    spec, rng = policy.spec, np.random.default_rng(0)
    obs = Observation(
        images=rng.integers(0, 256, (3, len(env.cameras.names), *env.cameras.size, 3), np.uint8),
        state=rng.normal(size=(3, env.state_dim)).astype(np.float32),
        instructions=((env.instructions or env.tasks)[0],) * 3,
    )
    noise = generate_token_noise(np.arange(3), np.zeros(3, np.int64), spec.tokens_per_chunk)
    out = policy.act(obs, noise=noise)
    with torch.no_grad():
        scores = policy.score(obs, out.tokens)
    actions = spec.num_action_chunks
    assert run_plan.policy.scored - spec.scored == CONSTANT.get(case, 0)
    for part in (out.logprob, scores.logprob.numpy()):
        columns = part.reshape(3, actions, -1)
        counted = columns[..., : spec.scored or None]
        assert not (counted == 0).all((0, 1)).any(), "declared columns have a log-probability"
        assert not columns[..., counted.shape[2] :].any(), "all other columns are empty"
