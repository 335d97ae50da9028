"""Decisions of the run plan before any process starts."""

import pytest

from embodyrl.errors import ConfigError
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config


def run_plan(*overrides, training=False):
    return build_run_plan(load_config("train", ["env=tabletop", *overrides]), training=training)


def test_only_cameras_used_by_the_policy_are_rendered():
    both = ("model=openvla_oft_tiny", "env.init_params.camera_names=[front,wrist]")
    one = run_plan(*both)
    assert one.env.cameras.names == ("front",)
    assert one.env_settings.init_params.camera_names == ["front"]
    assert one.cfg.env.init_params.camera_names == ["front", "wrist"]
    two = run_plan(*both, "model.num_images_in_input=2")
    assert two.env.cameras.names == ("front", "wrist")
    images = [next(f.shape for f in plan.layout.fields if f.name == "images") for plan in (one, two)]
    assert images == [(1, 56, 56, 3), (2, 56, 56, 3)]
    # An expert reads none; what it collects shows all of them.
    assert run_plan("model=scripted").env.cameras.names == ("front", "wrist")


@pytest.mark.parametrize("words", ["algorithm.curriculum=0.5", "env.train.task_weights=[1,1,2]"])
def test_task_weights_are_rejected_with_random_reset_ids(words):
    """The weights cannot be ignored: each episode of an environment has its own initial state."""
    ppo = ("env.train.task_ids=[0,1,2]", "algorithm=ppo", words)
    run_plan(*ppo, training=True)
    for free in ("env.train.use_fixed_reset_state_ids=false", "env.train.continue_episodes=true"):
        with pytest.raises(ConfigError, match=rf"{words.partition('=')[0]} weights initial states, but environments"):
            run_plan(*ppo, free, training=True)


def test_task_weights_must_match_the_number_of_tasks():
    """The error is reported before workers start."""
    words = ("env.train.task_ids=[0,1,2]", "algorithm=grpo")
    run_plan(*words, "env.train.task_weights=[1,1,2]", training=True)
    with pytest.raises(ConfigError, match="has 2 weights for 3 tasks"):
        run_plan(*words, "env.train.task_weights=[1,2]", training=True)


@pytest.mark.parametrize("model", ["scripted", "random"])
def test_rl_rejects_policies_without_log_probabilities(model):
    with pytest.raises(ConfigError, match=rf"model '{model}' cannot be trained: it has no weights"):
        run_plan(f"model={model}", training=True)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["env=gym", "env.id=CartPole-v1"], "discrete actions; choose another model, for example model=mlp"),
        (["env=text/copy"], "text actions; choose another model, for example model=causal_lm_tiny"),
        (["env=text/copy", "model=cnn"], "choose another model, for example model=causal_lm_tiny"),
    ],
)
def test_mismatched_model_error_suggests_a_suitable_model(words, fix):
    with pytest.raises(ConfigError) as caught:
        build_run_plan(load_config("train", words), training=True)
    assert fix in caught.value.problems[0]
    assert not any("unnorm_key" in line or "max_new_tokens" in line for line in caught.value.problems)


@pytest.mark.parametrize("stale", [0, 2])
def test_record_capacity_includes_final_observations(stale):
    """4 environments, 2 epochs, 3 chunks each: 24 chunks of 12 episodes, of which 8 may be cut; for all open steps."""
    words = ("algorithm=ppo", "env.train.total_num_envs=4", "algorithm.rollout_epoch=2", "model.num_action_chunks=4")
    limits = ("env.train.max_episode_steps=8", "env.train.max_steps_per_rollout_epoch=12")
    plan = run_plan(*words, *limits, f"algorithm.max_staleness={stale}", training=True)
    assert plan.capacity == (1 + stale) * (24 + 12 + 8) + 2 * plan.num_envs


def test_run_ends_at_max_epochs_or_max_steps():
    """Twelve states and four groups per step: three steps are an epoch."""
    words = ("algorithm=grpo", "algorithm.group_size=2", "env.train.total_num_envs=8", "env.train.task_ids=[0,1,2]")
    words = (*words, "env.train.state_ids=[0,3]", "runner.max_epochs=3")
    assert run_plan(*words, "runner.max_steps=100", "algorithm.rollout_epoch=1", training=True).total_steps == 9
    assert run_plan(*words, "runner.max_steps=100", "algorithm.rollout_epoch=4", training=True).total_steps == 3
    assert run_plan(*words, "runner.max_steps=5", "algorithm.rollout_epoch=1", training=True).total_steps == 5


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        # 8 environments x 32 env steps = 256 samples: 4 minibatches in each of 10 epochs, or half an update per sample.
        (("algorithm=ppo", "algorithm.update_epoch=10", "actor.global_batch_size=64"), 40),
        (("algorithm=sac", "algorithm.updates_per_sample=0.5", "actor.global_batch_size=64"), 128),
    ],
)
def test_off_policy_optimizer_steps_do_not_depend_on_update_epoch(words: tuple[str, ...], steps: int):
    """The model's file sets `update_epoch` to 10, which only policy gradients read."""
    pendulum = ("env=gym", "env.id=Pendulum-v1", "model=mlp", "launcher=inline")
    shape = ("env.train.total_num_envs=8", "env.train.max_steps_per_rollout_epoch=32")
    plan = run_plan(*pendulum, *shape, *words, training=True)
    assert (plan.max_samples, plan.optimizer_steps_per_training_step) == (256, steps)
