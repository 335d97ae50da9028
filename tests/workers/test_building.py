"""Policies, references and critics of a policy host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from embodyrl.channels.arena import Arena
from embodyrl.learners.policy_gradient import PolicyGradientLearner
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.scheduler.start import build_policy_init
from embodyrl.workers.building import build_policy
from embodyrl.workers.policy_host import PolicyHost

SMALL = ("env=gym", "env.id=CartPole-v1", "model=mlp", "model.hidden_sizes=[8,8]", "algorithm=ppo", "launcher=inline")


@contextmanager
def host(folder: Path, *words: str, start_from: Path | None = None) -> Iterator[PolicyHost]:
    run_plan = build_run_plan(load_config("train", [*words, f"runner.output_dir={folder}"]), training=True)
    with (
        closing(Arena.create(run_plan.layout, run_plan.capacity)) as arena,
        closing(PolicyHost(build_policy_init(run_plan, arena, start_from))) as opened,
    ):
        yield opened


def test_kl_reference_has_the_initial_weights(tmp_path):
    """The weights of ckpt=, not those of a new policy."""
    (tmp_path / "saved").mkdir()
    with host(tmp_path, *SMALL, "seed=5") as other:
        other.policy.save(tmp_path / "saved")
        saved = {name: weight.clone() for name, weight in other.policy.module.state_dict().items()}
    with host(tmp_path, *SMALL, "algorithm.kl_beta=0.1", start_from=tmp_path / "saved") as own:
        assert isinstance(own._learner, PolicyGradientLearner)
        assert own._learner._reference is not None
        for module in (own.policy.module, own._learner._reference.module):
            for name, weight in module.state_dict().items():
                assert torch.equal(weight, saved[name]), name


def test_separate_critic_is_fully_trained_next_to_adapters(tmp_path):
    from embodyrl.policies.causal_lm.critic import PolicyWithCritic

    words = ("env=text/copy", "model=causal_lm_tiny", "algorithm=ppo", "algorithm.reward_type=action_level")
    (tmp_path / "critic").mkdir()
    with host(tmp_path, *words, "launcher=inline") as other:
        other.policy.save(tmp_path / "critic")
    words = (*words, "launcher=inline", "model.is_lora=true", f"critic.path={tmp_path}/critic")
    run_plan = build_run_plan(load_config("train", [*words, f"runner.output_dir={tmp_path}"]), training=True)
    with closing(Arena.create(run_plan.layout, run_plan.capacity)) as arena:
        policy = build_policy(build_policy_init(run_plan, arena, None))
    assert isinstance(policy, PolicyWithCritic)
    trained = {name for name, weight in policy.module.named_parameters() if weight.requires_grad}
    critic = {name for name, _ in policy.module.named_parameters() if name.startswith("value_head.")}
    assert trained >= critic
    assert critic
    assert not [name for name in critic if "lora_" in name]
    assert all("lora_" in name for name in trained - critic)
    assert trained - critic
