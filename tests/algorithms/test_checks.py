import subprocess
import sys

import pytest
from settings import algorithm_of

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.protocol import ADVANTAGES, LOSSES
from embodyrl.algorithms.settings import AlgorithmSettings, RewardLevel, RewardNorm, TokenLevel
from embodyrl.config.settings import get_keys
from embodyrl.errors import ConfigError, UnknownNameError
from embodyrl.plan.schema import get_algorithm_settings


def keys(adv_type: str, loss_type: str) -> set[str]:
    return {key for kind in get_algorithm_settings(adv_type, loss_type) for key in get_keys(kind)}


@pytest.mark.integration
def test_imports_and_settings_do_not_require_torch():
    code = (
        "import sys; from embodyrl.algorithms import policy_gradient as a; from embodyrl.plan import schema as p;"
        "a.Algorithm(p.get_algorithm_settings('gae', 'ppo_clip')[0](adv_type='gae')); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_estimator_combines_with_every_loss():
    meant: dict[str, str] = {}
    for name in ADVANTAGES.names():
        for loss in LOSSES.names():
            cfg = algorithm_of(name, loss)
            assert isinstance(cfg, AlgorithmSettings)
            assert list(cfg.problems()) == []
            for key, one in (get_keys(type(cfg)) | get_keys(type(cfg.loss))).items():
                assert meant.setdefault(key, one.expectation) == one.expectation


def test_accepted_keys_depend_on_the_estimator():
    only_gae = {"gamma", "gae_lambda", "reward_type", "value_clip", "huber_delta", "value_coef", "critic_warmup"}
    only_gae |= {"normalize_returns", "normalize_per_task"}
    grpo, gae = keys("grpo", "ppo_clip"), keys("gae", "ppo_clip")
    assert gae - grpo == only_gae
    assert grpo - gae == {"filter_rewards", "filter_returns", "filter_refills", "std_unbiased"}


def test_accepted_keys_depend_on_the_loss():
    assert keys("grpo", "ppo_clip") - keys("grpo", "pg") == {"clip_ratio_low", "clip_ratio_high", "clip_ratio_c"}
    assert keys("grpo", "sapo") - keys("grpo", "pg") == {"sapo_tau_pos", "sapo_tau_neg"}


@pytest.mark.parametrize(
    ("adv_type", "loss_type", "meant"), [("grppo", "ppo_clip", "grpo"), ("grpo", "ppo_clipp", "ppo_clip")]
)
def test_unknown_estimator_or_loss_is_an_error(adv_type: str, loss_type: str, meant: str):
    with pytest.raises(UnknownNameError, match=f"Did you mean '{meant}'"):
        get_algorithm_settings(adv_type, loss_type)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, "algorithm.group_size=1"),
        ({"reward_scale": 0.0}, "set kl_beta above 0"),
        pytest.param(
            {"adv_type": "gdpo", "truncated_episodes": "zero_reward"}, "normalizes each reward component separately"
        ),
        ({"adv_type": "remax", "reward_norm": RewardNorm.batch}, "compares each episode with a greedy episode"),
        ({"kl_in_reward": True, "kl_beta": 0.1, "kl_penalty_type": "k3+"}, "is for the loss only"),
        (
            {"adv_type": "gae", "reward_type": RewardLevel.action_level, "logprob_type": TokenLevel.chunk_level},
            "one ratio per chunk",
        ),
    ],
)
def test_contradictory_algorithm_settings_are_reported(changes: dict, message: str):
    found = list(algorithm_of(**changes).problems())
    assert len(found) == 1
    assert message in found[0]
    with pytest.raises(ConfigError, match=found[0].split()[0]):
        Algorithm(algorithm_of(**changes))


def test_all_contradictory_algorithm_settings_are_reported_together():
    assert len(list(algorithm_of(group_size=1, kl_in_reward=True, kl_beta=0.1, kl_penalty_type="k3+").problems())) == 2


def test_group_size_one_is_valid_with_a_value_head():
    assert list(algorithm_of(adv_type="gae", group_size=1).problems()) == []


def test_grpo_accepts_chunk_level_ratios():
    assert list(algorithm_of(logprob_type=TokenLevel.chunk_level).problems()) == []


def test_critic_warmup_needs_a_value_loss():
    """Otherwise, no weights would be trained in these steps."""
    assert Algorithm(algorithm_of(adv_type="gae", critic_warmup=3)).critic_warmup == 3
    assert Algorithm(algorithm_of(adv_type="gae", critic_warmup=3, value_coef=0.0)).critic_warmup == 0


def test_value_dim_counts_value_head_outputs():
    assert Algorithm(algorithm_of()).value_dim(8) == 0
    assert Algorithm(algorithm_of(adv_type="gae")).value_dim(8) == 1
    assert Algorithm(algorithm_of(adv_type="gae", reward_type=RewardLevel.action_level)).value_dim(8) == 8


@pytest.mark.parametrize("file", ["lonely_part.py", "lonely_part/lonely_part/__init__.py"])
def test_loss_module_in_the_working_folder_is_found(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownNameError, match=r"No module named 'lonely_part'\.$"):
        ADVANTAGES.get("lonely_part:FACTORY")
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    home = path.parent if path.name == "lonely_part.py" else path.parent.parent
    with pytest.raises(UnknownNameError) as caught:
        ADVANTAGES.get("lonely_part:FACTORY")
    assert str(caught.value).endswith(f"export PYTHONPATH=$PYTHONPATH:{home}")
