"""Presets of embodyrl that name another system: equal to its published recipe, except for the listed differences."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from embodyrl_migrate.report import compare
from embodyrl_migrate.source import read_source
from embodyrl_migrate.translate import Migration, translate

import embodyrl
from embodyrl.config.compose import flatten
from embodyrl.config.settings import to_builtin

DATA = Path(__file__).parent / "data"
CONF = Path(__file__).parents[3] / "conf"
SYSTEMS = re.compile(r"(?i:rlinf|simplevla|cosmos)|\b(verl|ROLL|AReaL)\b")
OWN: dict[str, tuple[str, list[str]]] = {
    # RLinf's maniskill_ppo_openvlaoft.yaml (f800d4d), as overrides of its recipe for LIBERO
    "rlinf maniskill": (
        "rlinf_libero_10_grpo.yaml",
        [
            *("algorithm.adv_type=gae", "algorithm.loss_type=actor_critic", "algorithm.group_size=1"),
            *("+algorithm.value_clip=0.2", "+algorithm.huber_delta=10", "algorithm.filter_rewards=false"),
            *("algorithm.rollout_epoch=1", "algorithm.sampling_params.temperature=1"),
            *("+algorithm.sampling_params.temperature_eval=0.6", "runner.val_check_interval=20"),
            *("env.train.auto_reset=true", "env.train.group_size=1", "env.train.total_num_envs=128"),
            *("env.train.max_episode_steps=80", "env.train.max_steps_per_rollout_epoch=160", "env.train.reward_coef=1"),
            *("env.eval.max_episode_steps=80", "actor.global_batch_size=640", "actor.optim.lr=1e-4"),
            *("actor.optim.clip_grad=10", "actor.optim.adam_eps=1e-8"),
        ],
    ),
    # verl's quickstart on GSM8K, with GRPO: 32 prompts of 8 replies
    "verl quickstart": (
        "verl_grpo_gsm8k.yaml",
        [
            *("data.train_batch_size=32", "actor_rollout_ref.rollout.n=8", "data.max_response_length=512"),
            *("actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.use_kl_loss=false"),
            *("actor_rollout_ref.actor.clip_ratio_high=0.2", "actor_rollout_ref.actor.optim.lr_warmup_steps=0"),
            *("actor_rollout_ref.actor.optim.weight_decay=0.01", "actor_rollout_ref.actor.optim.lr=1e-6"),
            "trainer.test_freq=20",
        ],
    ),
}


def because(reason: str, facts: str) -> dict[str, str]:
    return dict.fromkeys(facts.split(", "), reason)


SIZES = because(
    "the size of a run is left to the user",
    "episodes, prompts, samples, steps, initial states, validation every, validation episodes",
)
LOGPROB = because("the values of the rollout and of a second forward pass are equal", "old logprob")
SIMPLEVLA = {
    **LOGPROB,
    **because("filter_refills is an option: its cost has no limit", "refill rounds"),
    **because("advantages are divided by the group's deviation", "reward scale"),
}
MANISKILL = {
    **because(
        "an episode ends with its success, so later actions of the chunk are never executed", "actions after success"
    ),
    **because("keys of LIBERO", "settle steps, settle gripper"),
}
EXPERIMENT = because(
    "validation is on held-out states, within a budget", "steps, initial states, validation every, validation episodes"
)
SMALLER = because("a quarter of the groups, for one GPU", "episodes, prompts, samples")
FLOW = {
    **SIMPLEVLA,
    **EXPERIMENT,
    **because("for one GPU", "episodes, prompts, samples, optimizer steps"),
    **because(
        "the flow policy's own", "horizon, actions per query, temperature, loss temperature, aggregation, warmup"
    ),
}
PRESETS: dict[str, tuple[list[str], str, dict[str, str]]] = {
    "algorithm/simplevla": (
        ["env=libero_spatial", "model=openvla_oft_simplevla", "algorithm=simplevla"],
        "longzhenren, libero_spatial",
        SIZES | SIMPLEVLA | because("no validation by default", "validation temperature"),
    ),
    "algorithm/rlinf_grpo": (
        ["env=libero_spatial", "model=openvla_oft_rlinf", "algorithm=rlinf_grpo"],
        "libero_spatial_grpo_openvlaoft",
        {key: why for key, why in SIZES.items() if "validation" not in key}
        | because("keys of LIBERO, named in the preset", "settle steps, settle gripper"),
    ),
    "algorithm/rlinf_ppo": (
        ["env=maniskill", "model=openvla_oft_rlinf", "algorithm=rlinf_ppo", "env.train.max_episode_steps=80"],
        "rlinf maniskill",
        SIZES | MANISKILL | because("the size of a run", "optimizer steps, validation temperature"),
    ),
    "experiment/libero_10_full_8gpu": (
        ["experiment=libero_10_full_8gpu"],
        "hilookas, libero_10",
        SIMPLEVLA | EXPERIMENT,
    ),
    "experiment/libero_10_lora_1gpu": (
        ["experiment=libero_10_lora_1gpu"],
        "hilookas, libero_10",
        SIMPLEVLA | EXPERIMENT | SMALLER | because("adapters are trained", "learning rate"),
    ),
    "experiment/libero_spatial_pi05_1gpu": (["experiment=libero_spatial_pi05_1gpu"], "hilookas, libero_spatial", FLOW),
    "experiment/libero_spatial_smolvla_1gpu": (
        ["experiment=libero_spatial_smolvla_1gpu"],
        "hilookas, libero_spatial",
        FLOW,
    ),
    "experiment/maniskill_ppo_1gpu": (
        ["experiment=maniskill_ppo_1gpu"],
        "rlinf maniskill",
        MANISKILL | because("another task, within a budget", "steps, initial states, validation episodes"),
    ),
    "experiment/gsm8k_vllm_1gpu": (
        ["experiment=gsm8k_vllm_1gpu"],
        "verl quickstart",
        LOGPROB | because("steps instead of epochs, a sample of the test rows", "steps, epochs, validation episodes"),
    ),
}
"""By preset: arguments, recipe, and facts that differ, with the reason."""
EVALS: dict[str, tuple[list[str], str, list[str], dict[str, str]]] = {
    "eval/libero_rlinf": (
        ["env=libero_spatial", "model=openvla_oft_rlinf"],
        "libero_spatial_grpo_openvlaoft",
        ["runner.val_check_interval=5", "env.eval.reset_gripper_open=false"],
        because("named in the sources of the protocol", "env.eval.max_episode_steps, env.settle_gripper"),
    ),
    "eval/libero_simplevla": (
        ["env=libero_spatial", "model=openvla_oft_simplevla"],
        "hilookas, libero_spatial",
        [],
        {},
    ),
    "eval/maniskill_put_on_plate": (
        ["env=maniskill_bridge", "model=openvla_oft_rlinf"],
        "rlinf maniskill",
        [],
        because("keys of LIBERO", "env.settle_steps, env.settle_gripper"),
    ),
}
MODELS = {
    "model/openvla_oft_simplevla": "hilookas, libero_10",
    "model/openvla_oft_rlinf": "libero_spatial_grpo_openvlaoft",
}
DATA_PACKAGE = {"eval/libero_plus"}
"""Files that name a package with a system's name."""


def migrated(recipe: str, more: list[str] | None = None) -> Migration:
    found = yaml.safe_load((DATA / "recipes.yaml").read_text())["recipes"].get(recipe)
    base, overrides = (found["base"], found["overrides"]) if found else OWN[recipe]
    return translate(read_source(DATA / base, [*overrides, *(more or [])]))


def test_every_preset_that_names_a_system_is_compared_with_its_recipe() -> None:
    files = {str(path.relative_to(CONF).with_suffix("")): path.read_text() for path in CONF.rglob("*.yaml")}
    named = {name for name, text in files.items() if SYSTEMS.search(name + text)}
    assert named == {*PRESETS, *EVALS, *MODELS} | DATA_PACKAGE


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_has_the_same_settings_as_its_source_recipe(preset: str) -> None:
    words, recipe, reasons = PRESETS[preset]
    result = replace(migrated(recipe), config=embodyrl.compose("train", *words))
    differ = {fact.what: (fact.theirs, fact.ours) for fact in compare(result) if fact.mark}
    assert differ.keys() == reasons.keys(), differ


@pytest.mark.parametrize("preset", EVALS)
def test_protocol_has_the_same_evaluation_settings_as_its_source_recipe(preset: str) -> None:
    words, recipe, more, reasons = EVALS[preset]
    theirs = migrated(recipe, more).flat
    ours = flatten(to_builtin(embodyrl.compose("eval", *words, f"eval={Path(preset).name}")))
    keys = ["env.eval.max_episode_steps", "env.settle_steps", "env.settle_gripper"]
    keys += ["eval.sampling_params.do_sample", "eval.sampling_params.temperature"]
    differ = {key: (theirs.get(key), ours.get(key)) for key in keys if theirs.get(key) != ours.get(key)}
    assert differ.keys() == reasons.keys(), differ


@pytest.mark.parametrize("preset", MODELS)
def test_model_preset_matches_the_policy_of_its_source_system(preset: str) -> None:
    result = migrated(MODELS[preset])
    assert result.groups["model"] == Path(preset).name
    unset = flatten(to_builtin(embodyrl.compose("train", f"env={result.groups['env']}", f"model={Path(preset).name}")))
    theirs = {key: value for key, value in result.flat.items() if key.startswith("model.")}
    differ = {key for key, value in theirs.items() if unset[key] != value}
    assert differ <= {"model.path", "model.unnorm_key", "model.precision"}
