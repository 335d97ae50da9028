"""A critic that is separate from the language model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gates import learn
from safetensors.torch import load_file
from text_runs import ASKING
from toy_runs import rows

from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config
from embodyrl.policies import POLICIES
from embodyrl.policies.causal_lm.critic import PolicyWithCritic
from embodyrl.policies.protocol import Policy, PolicyRequest, get_weights_version, mark_weights_changed
from embodyrl.types import Observation

ASKED = Observation(
    images=np.zeros((2, 0, 0, 0, 3), np.uint8), state=np.zeros((2, 0), np.float32), instructions=("1+2=", "abc")
)


def build(seed: int, value_dim: int) -> Policy:
    factory = POLICIES.get("causal_lm_tiny")
    cfg = factory.settings(model_type="causal_lm_tiny", num_action_chunks=3, precision="fp32")
    return factory.build(cfg, PolicyRequest(env=ASKING, device="cpu", seed=seed, value_dim=value_dim))


def critic(seed: int = 2) -> Policy:
    found = build(seed, 3)
    with torch.no_grad():
        found.module.value_head.weight.fill_(0.1)  # type: ignore[union-attr]
    return found


def test_values_are_computed_by_the_separate_critic(tmp_path: Path) -> None:
    policy, other = build(1, 0), critic()
    joined = PolicyWithCritic(policy, other, "c")
    out = joined.act(ASKED, noise=np.full((2, 3), 0.4, np.float32))
    assert joined.spec.value_dim == 3
    torch.testing.assert_close(joined.score(ASKED, out.tokens).value, other.score(ASKED, out.tokens).value)
    np.testing.assert_allclose(out.value, other.score(ASKED, out.tokens).value.detach().numpy(), atol=1e-6)
    np.testing.assert_array_equal(out.tokens, policy.act(ASKED, noise=np.full((2, 3), 0.4, np.float32)).tokens)
    scores = joined.score(ASKED, out.tokens)
    scores.logprob.sum().backward(retain_graph=True)
    assert all(p.grad is None for p in other.module.parameters()), "the policy's loss does not reach the critic"
    scores.value.sum().backward()
    assert any(p.grad is not None for name, p in joined.module.named_parameters() if name.startswith("value_head.lm"))
    joined.save(tmp_path)
    again = PolicyWithCritic(build(5, 0), build(6, 3), "c")
    again.load_weights(tmp_path)
    np.testing.assert_allclose(again.values(ASKED), joined.values(ASKED), atol=1e-6)


def test_weight_updates_with_a_separate_critic_reach_the_engine() -> None:
    """The version of the combined module differs from that of the policy, which its engine checks."""
    policy = build(1, 0)
    joined = PolicyWithCritic(policy, critic(), "c")
    joined.act(ASKED, noise=None)
    known = get_weights_version(policy.module)
    joined.act(ASKED, noise=None)
    assert get_weights_version(policy.module) == known, "nothing has changed"
    mark_weights_changed(joined.module)
    joined.act(ASKED, noise=None)
    assert get_weights_version(policy.module) != known


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_ppo_trains_and_saves_policy_and_critic(tmp_path: Path) -> None:
    (tmp_path / "critic").mkdir()
    critic().save(tmp_path / "critic")
    words = ("algorithm=ppo", "algorithm.reward_type=action_level", f"critic.path={tmp_path}/critic", "launcher=inline")
    words = (*words, "algorithm.kl_beta=0.01", "algorithm.reference_interval=2")
    few = ("runner.max_steps=2", "env.train.total_num_envs=16", "eval.episodes=4", "env.eval.total_num_envs=4")
    result = learn(tmp_path, "copy", *words, *few, "actor.global_batch_size=16", "actor.micro_batch_size=16")
    assert [row["actor/logprob_gap"] < 1e-4 for row in rows(result.run) if "actor/logprob_gap" in row] == [True, True]
    folder = next((result.run / "checkpoints").glob("step_*")) / "policy"
    before, after = (load_file(f / "model.safetensors") for f in (tmp_path / "critic", folder / "critic"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(before[name], after[name])
    own, reference = (load_file(f / "model.safetensors") for f in (folder, folder.parent / "reference"))
    assert not torch.equal(own[name], after[name])
    assert torch.equal(own[name], reference[name])
    assert not (folder.parent / "reference" / "critic").exists(), "a reference values nothing"


CRITIC = ("env=text/copy", "model=causal_lm_tiny", "critic.path=c")


def test_a_separate_critic_rejects_deterministic_mode() -> None:
    with pytest.raises(ConfigError, match=r"without runner\.deterministic"):
        load_config("train", [*CRITIC, "algorithm=ppo", "runner.deterministic=true"])


def test_separate_critic_is_unused_by_grpo_and_warns() -> None:
    (line,) = load_config("train", [*CRITIC, "algorithm=grpo"]).warnings
    assert line.startswith("critic.path has no effect")
