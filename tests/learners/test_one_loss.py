"""Each preset uses the single implementation of its loss: an exception in the loss ends the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embodyrl.algorithms import policy_losses
from embodyrl.algorithms.protocol import LOSSES
from embodyrl.commands.train import train
from embodyrl.config import compose
from embodyrl.plan.config import load_config
from embodyrl.policies.actor_critic.policy import ActorCriticPolicy

PRESETS = sorted(compose.options("algorithm").keys() - {"iql", "td3_bc"})
"""IQL needs a data set (tests/learners/iql), TD3+BC a regression head (tests/learners/off_policy)."""
REPLAYS = {"sac", "rlpd", "filtered_bc"}
SINGLE = REPLAYS | {"ppo", "rlinf_ppo", "remax", "reinforce_pp"}
"""Presets without groups."""
OWN = {
    "sac": ("model.squashed=true", "algorithm.learning_starts=1"),
    "rlpd": ("model.squashed=true", "algorithm.learning_starts=1", "algorithm.demonstrations=[]"),
    "filtered_bc": ("algorithm.learning_starts=1", "algorithm.imitate_above=-1000", "actor.micro_batch_size=8"),
    # These leave out groups by their success, which this environment never reports.
    **dict.fromkeys(("dapo", "simplevla", "rlinf_grpo"), ("algorithm.filter_rewards=null",)),
}


def small_run(folder: Path, preset: str) -> Any:
    groups = () if preset in SINGLE else ("algorithm.group_size=2",)
    quota = ("env.train.max_steps_per_rollout_epoch=3",) if preset in {"ppo", "rlinf_ppo"} else ()
    return load_config(
        "train",
        [
            *("env=gym", "env.id=Pendulum-v1", "model=mlp", f"algorithm={preset}", "launcher=inline"),
            *("env.train.total_num_envs=2", "env.train.max_episode_steps=3", "runner.max_steps=1"),
            *("actor.global_batch_size=8", "runner.val_check_interval=-1"),
            *("runner.save_interval=-1", "runner.logger.backends=[jsonl]", f"runner.output_dir={folder}"),
            *groups,
            *quota,
            *(() if preset in REPLAYS else ("actor.micro_batch_size=8",)),
            *OWN.get(preset, ()),
        ],
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_loss_exception_ends_the_training(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from embodyrl.algorithms.objectives import losses
    from embodyrl.learners.off_policy import sac_learner as sac

    def broken(*_: Any, **__: Any) -> Any:
        raise ArithmeticError("the loss was called")

    for name in LOSSES.names():
        module = policy_losses if hasattr(policy_losses, name.upper()) else losses
        monkeypatch.setattr(module, name.upper(), replace(LOSSES.get(name), compute=broken))
    monkeypatch.setattr(sac, "critic_loss", broken)
    monkeypatch.setattr(ActorCriticPolicy, "imitate", broken)
    with pytest.raises(Exception, match="the loss was called"):
        train(small_run(tmp_path, preset))
