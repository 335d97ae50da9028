import subprocess
import sys
from dataclasses import fields

import pytest

from embodyrl.algorithms import ADVANTAGES, LOSSES, consumed_keys, problems, value_dim
from embodyrl.config.schema import AlgorithmConfig, RewardLevel, TokenLevel, WeightMode
from embodyrl.errors import UnknownNameError


def test_import_and_checks_need_no_torch():
    code = (
        "import sys, embodyrl.algorithms as a; from embodyrl.config.schema import AlgorithmConfig;"
        "a.consumed_keys('gae', 'ppo_clip'); a.problems(AlgorithmConfig());"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_consumed_keys_are_keys_of_the_schema():
    schema = {field.name for field in fields(AlgorithmConfig)}
    for name in ADVANTAGES.names():
        for loss in LOSSES.names():
            assert consumed_keys(name, loss) <= schema


def test_every_key_of_the_schema_is_read_by_some_choice():
    read = {key for name in ADVANTAGES.names() for loss in LOSSES.names() for key in consumed_keys(name, loss)}
    assert {field.name for field in fields(AlgorithmConfig)} == read


def test_consumed_keys_follow_the_estimator():
    only_gae = {"gamma", "gae_lambda", "reward_type", "value_clip", "huber_delta", "value_coef", "critic_warmup"}
    grpo, gae = consumed_keys("grpo", "ppo_clip"), consumed_keys("gae", "ppo_clip")
    assert gae - grpo == only_gae
    assert grpo - gae == {"filter_rewards", "filter_refills", "std_unbiased"}


def test_consumed_keys_of_an_unknown_name():
    with pytest.raises(UnknownNameError, match="Did you mean 'grpo'"):
        consumed_keys("grppo", "ppo_clip")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adv_type": "gea"}, "Did you mean 'gae'"),
        ({"loss_type": "ppo_clipp"}, "Did you mean 'ppo_clip'"),
        ({"loss_agg_func": "token_mean"}, "Did you mean 'token-mean'"),
        ({"kl_penalty_type": "k4", "kl_beta": 0.1}, "algorithm.kl_penalty_type: unknown 'k4'"),
        ({"kl_penalty_type": "k1"}, "no effect while kl_beta is 0"),
        ({"group_size": 1}, "algorithm.group_size=1"),
        ({"kl_in_reward": True}, "kl_beta is 0"),
        ({"kl_target": 0.1, "kl_beta": 0.1}, "kl_in_reward is false"),
        ({"kl_in_reward": True, "kl_beta": 0.1, "kl_penalty_type": "k3+"}, "is a form for the loss"),
        ({"m2_threshold": 0.1}, "old_logprob=recompute"),
        ({"behave_weight_mode": WeightMode.truncate}, "behave_weight_threshold is null"),
    ],
)
def test_problems(changes: dict, message: str):
    found = problems(AlgorithmConfig(**changes))
    assert len(found) == 1
    assert message in found[0]


def test_all_problems_are_reported_together():
    assert len(problems(AlgorithmConfig(group_size=1, kl_in_reward=True, loss_agg_func="x"))) == 3


def test_defaults_have_no_problems():
    assert problems(AlgorithmConfig()) == []
    assert problems(AlgorithmConfig(adv_type="gae", group_size=1)) == []


def test_grpo_does_not_mind_chunk_level_ratios():
    assert problems(AlgorithmConfig(logprob_type=TokenLevel.chunk_level)) == []


def test_value_dim():
    assert value_dim(AlgorithmConfig(), 8) == 0
    assert value_dim(AlgorithmConfig(adv_type="gae"), 8) == 1
    assert value_dim(AlgorithmConfig(adv_type="gae", reward_type=RewardLevel.action_level), 8) == 8
