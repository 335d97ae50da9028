"""Recipes of other frameworks: settings that affect results are kept, all others are reported."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from embodyrl_migrate.report import BOUND, Fact, compare, reasons
from embodyrl_migrate.source import Source, read_source
from embodyrl_migrate.tables import load_system, systems
from embodyrl_migrate.translate import Migration, translate

DATA = Path(__file__).parent / "data"
EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load((DATA / "expected.yaml").read_text())
"""By file, worked out by hand: `facts`, values of what decides the result; `reasons` against an experiment; `refused`
parts; `missing` files; or the number of `keys`."""


@cache
def migrated(name: str, *overrides: str) -> tuple[Migration, list[Fact], list[str], Source]:
    source = read_source(DATA / name, overrides)
    result = translate(source)
    facts = compare(result) if result.config is not None else []
    return result, facts, reasons(result, facts, source), source


def subject(reason: str) -> str:
    """Return the fact, the key or the part of a reason."""
    kind, _, rest = reason.partition(": ")
    if kind in ("differs", "not known there", "not known here"):
        return rest.partition(":")[0]
    return rest.partition("=")[0] if kind == "unsupported key" else kind


@pytest.mark.parametrize("name", [name for name, wanted in EXPECTED.items() if "facts" in wanted])
def test_settings_that_affect_results_are_kept_or_reported(name: str) -> None:
    result, facts, why, _ = migrated(name)
    wanted = EXPECTED[name]
    assert list(dict.fromkeys(map(subject, why))) == wanted.get("reasons", [])
    ours = {fact.what: fact.ours for fact in facts}
    for what, value in wanted["facts"].items():
        # Lines that are off in both are not shown.
        assert ours.get(what, "off") == (pytest.approx(value) if isinstance(value, float) else value), what
    written = {**result.flat, **result.settings}
    for key, value in wanted.get("settings", {}).items():
        assert written[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    assert {key: result.groups[key] for key in wanted.get("groups", {})} == wanted.get("groups", {})


@pytest.mark.parametrize("name", [name for name, wanted in EXPECTED.items() if "refused" in wanted])
def test_unknown_components_are_rejected_with_a_suggestion(name: str) -> None:
    _, _, why, _ = migrated(name)
    for part, words in EXPECTED[name]["refused"].items():
        lines = [line for line in why if line.startswith(f"{part}: ") and words in line]
        assert len(lines) == 1, why
        assert " Nearest: " in lines[0]


@pytest.mark.parametrize("name", [name for name, wanted in EXPECTED.items() if "missing" in wanted])
def test_missing_file_is_the_only_reported_reason(name: str) -> None:
    result, _, why, source = migrated(name)
    assert list(dict.fromkeys(source.missing)) == EXPECTED[name]["missing"]
    assert [line.startswith("missing file: ") for line in why] == [True] * len(EXPECTED[name]["missing"])
    assert result.config is None


@pytest.mark.parametrize("name", [name for name, wanted in EXPECTED.items() if "missing" not in wanted])
def test_every_source_key_has_a_migration_status(name: str) -> None:
    result, _, _, source = migrated(name)
    account = [verdict for verdict in result.verdicts if not verdict.is_default]
    assert sorted(verdict.key for verdict in account) == sorted(source.values)
    assert all(v.note for v in account if v.state in ("changed", "not needed", "unsupported", "unknown"))
    assert result.system.folder == next(system for system in systems() if name.startswith(system))
    assert len(source.values) == EXPECTED[name].get("keys", len(source.values))


LIBERO_GRPO = "rlinf_libero_10_grpo.yaml"
FAMILIES: dict[str, dict[str, Any]] = yaml.safe_load((DATA / "rlinf_families.yaml").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_rlinf_config_families_have_the_expected_outcome(family: str) -> None:
    wanted = FAMILIES[family]
    result, _, why, _ = migrated(wanted["base"], *wanted.get("overrides", ()))
    found = list(dict.fromkeys(map(subject, why)))
    assert (2 if why else 0) == wanted["exit"]
    if "refused" in wanted:
        assert found[0] == wanted["refused"]  # the lines that follow from a missing part are named too
        simulators = [word.lstrip("+") for word in wanted["overrides"] if "env_type=" in word]
        assert all(f"({name}" in why[0] for name in simulators), why[0]
        if "Nearest: env=metaworld" in why[0]:
            assert result.groups["env"] == "metaworld"
        return
    assert found == wanted.get("reasons", [])
    assert result.groups["algorithm"] == wanted["algorithm"]
    assert {key: result.flat[key] for key in wanted["keys"]} == wanted["keys"]


def test_every_rlinf_config_belongs_to_one_family() -> None:
    names = [name for wanted in FAMILIES.values() for name in wanted["configs"]]
    assert len(names) == len(set(names)) == 197


def test_rlinf_policies_and_simulators_without_counterpart_are_rejected() -> None:
    # rlinf/envs/__init__.py: SupportedEnvType; rlinf/config.py: SupportedModel
    simulators = "maniskill robotwin isaaclab metaworld behavior calvin robocasa realworld frankasim habitat"
    for name in f"{simulators} opensora_wm wan_wm genesis embodichain roboverse d4rl polaris surprise".split():
        assert subject(migrated(LIBERO_GRPO, f"+env.train.env_type={name}")[2][0]) == "environment", name
    policies = "gr00t gr00t_n1d6 gr00t_n1d7 dexbotic_pi starvla abot_m0 mlp_policy cnn_policy"
    for name in f"{policies} flow_policy surprise".split():
        assert subject(migrated(LIBERO_GRPO, f"actor.model.model_type={name}")[2][0]) == "model", name
    for name in ["decoupled_actor_critic", "embodied_sac", "embodied_dagger", "embodied_nft", "surprise"]:
        assert subject(migrated(LIBERO_GRPO, f"algorithm.loss_type={name}")[2][0]) == "loss", name
    for name in ["embodied_eval", "embodied_sft", "sft", "math", "reasoning", "surprise"]:
        assert subject(migrated(LIBERO_GRPO, f"runner.task_type={name}")[2][0]) == "task", name


PPO = (
    *(
        "algorithm.adv_type=gae",
        "algorithm.loss_type=actor_critic",
        "algorithm.filter_rewards=false",
        "env.train.group_size=1",
    ),
    *("+algorithm.value_clip=0.2", "+algorithm.huber_delta=10", "+actor.optim.value_lr=1e-4"),
)
CASES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "nothing filtered": (("algorithm.filter_rewards=false",), []),
    "groups with one success filtered": (("algorithm.rewards_lower_bound=1",), ["filtered groups"]),
    "groups with one failure filtered": (("algorithm.rewards_upper_bound=4",), ["filtered groups"]),
    "uniform groups filtered, with an entropy bonus": (("algorithm.entropy_bonus=0.01",), ["filtered groups"]),
    "uniform groups filtered, in a mean over all actions": (
        ("env.train.ignore_terminations=true",),
        ["filtered groups"],
    ),
    "chunks counted to their end": (("algorithm.reward_type=chunk_level",), ["actions after success"]),
    "one action per chunk": (("algorithm.reward_type=chunk_level", "actor.model.num_action_chunks=1"), []),
    "tokens cut": (("algorithm.sampling_params.top_k=50",), ["algorithm.sampling_params.top_k", "top k"]),
    "tokens cut, layout 0.3": (("+rollout.sampling_params.top_k=50",), ["rollout.sampling_params.top_k", "top k"]),
    "tokens cut, OpenVLA": (
        ("actor.model.model_type=openvla", "actor.model.num_action_chunks=1", "algorithm.sampling_params.top_k=50"),
        ["algorithm.sampling_params.top_k", "top k"],
    ),
    "256 tokens": (("algorithm.sampling_params.top_k=256",), []),
    "ppo, episodes that end at a time limit": (PPO, ["value aggregation", "value at time limit"]),
    "ppo, environments that refill": (
        (*PPO, "env.train.auto_reset=true", "actor.model.num_action_chunks=1"),
        [],
    ),
    "ppo, environments that refill, chunks": ((*PPO, "env.train.auto_reset=true"), ["actions after success"]),
    "ppo, values also after success": (
        (*PPO, "env.train.auto_reset=true", "+algorithm.bootstrap_type=always"),
        ["actions after success", "value at time limit"],
    ),
    "an unknown engine": (("rollout.backend=surprise",), ["task"]),
    "an unknown trainer": (("actor.training_backend=surprise",), ["task"]),
    "greedy validation": (("+algorithm.sampling_params.temperature_eval=-1", "runner.val_check_interval=5"), []),
    "validation at the temperature of the rollout": (("runner.val_check_interval=5",), []),
    "an unknown key": (("+actor.surprise=1",), ["unknown keys"]),
    "groups that share no initial state": (("env.train.group_size=1",), ["states shared by"]),
    "one initial state": (("+env.train.specific_reset_id=3",), ["env.train.specific_reset_id", "initial states"]),
    "the first initial state alone, in validation": (
        ("+env.eval.specific_reset_id=0", "runner.val_check_interval=5"),
        ["env.eval.specific_reset_id"],
    ),
    "a gripper that is not opened": (("env.train.reset_gripper_open=false",), []),
    "a gripper that is opened in validation alone": (
        (
            "env.train.reset_gripper_open=false",
            "env.eval.reset_gripper_open=true",
            "runner.val_check_interval=5",
        ),
        ["settle gripper"],
    ),
    "layout 0.1": (
        (
            "~env.train.total_num_envs",
            "~env.eval",
            "~actor.model.model_type",
            "+actor.model.model_name=openvla_oft",
            "+algorithm.num_group_envs=2",
        ),
        ["settle gripper", "settle steps"],
    ),
    "the other implementation of OpenVLA-OFT": (("+actor.model.implement_version=official",), ["model"]),
    "a step penalty": (
        ("+env.train.use_step_penalty=true",),
        ["env.train.use_step_penalty", "filtered groups", "reward"],
    ),
    "a cosine over another length": (
        ("+actor.optim.lr_scheduler=cosine", "+actor.optim.total_training_steps=500"),
        ["schedule length"],
    ),
    "a cosine over the run": (("+actor.optim.lr_scheduler=cosine", "+actor.optim.total_training_steps=1000"), []),
}
"""Overrides of one recipe of RLinf, and what ends with exit 2."""


@pytest.mark.parametrize("case", CASES)
def test_rlinf_settings_without_counterpart_are_reported(case: str) -> None:
    overrides, wanted = CASES[case]
    assert sorted(dict.fromkeys(map(subject, migrated(LIBERO_GRPO, *overrides)[2]))) == wanted


def test_keys_unused_by_rlinf_do_not_change_the_result() -> None:
    plain, _, differs, _ = migrated(LIBERO_GRPO)
    unread = (
        "algorithm.kl_beta=0.1",
        "algorithm.clip_ratio_c=5",
        "algorithm.loss_agg_func=token-sum",
        "algorithm.gamma=0.5",
    )
    result, _, why, _ = migrated(LIBERO_GRPO, *unread)
    assert why == differs
    assert result.settings == plain.settings


@pytest.mark.parametrize(
    ("layout", "words", "temperature"),
    [
        ("0.2", ("+algorithm.sampling_params.temperature_train=1.4",), 1.4),
        ("0.3", ("+rollout.sampling_params.temperature_train=1.3",), 1.3),
        ("0.3", ("+rollout.sampling_params.top_p=1",), 1),
        ("0.3", ("+env.train.rollout_epoch=8",), 1.6),
    ],
    ids=["algorithm", "rollout", "the older section is not read", "rollout_epoch"],
)
def test_sampling_keys_depend_on_the_config_layout_version(
    layout: str, words: tuple[str, ...], temperature: float
) -> None:
    result, _, why, _ = migrated(LIBERO_GRPO, *words)
    assert (result.layout, why) == (layout, [])
    assert result.flat["algorithm.sampling_params.temperature"] == temperature


def test_training_steps_are_limited_by_max_epochs_and_max_steps() -> None:
    for steps, wanted in ((-1, 1000), (300, 300), (2000, 1000)):
        result, *_ = migrated(LIBERO_GRPO, f"runner.max_steps={steps}")
        assert result.flat["runner.max_steps"] == wanted


def test_simplevla_ignores_entropy_epochs_and_schedule() -> None:
    actor = "actor_rollout_ref.actor"
    unread = (f"{actor}.entropy_coeff=0.5", f"{actor}.ppo_epochs=3", f"{actor}.optim.warmup_style=cosine")
    result, _, why, _ = migrated("simplevla_rl_libero.sh", *unread)
    assert why == []
    keys = ("algorithm.entropy_bonus", "algorithm.update_epoch", "actor.optim.schedule")
    assert [result.flat[key] for key in keys] == [0, 1, "constant"]


@pytest.mark.parametrize(("trials", "states"), [(20, [0, 19]), (49, [0, 48]), (50, None)])
def test_trials_per_task_select_the_first_initial_states(trials: int, states: list[int] | None) -> None:
    result, facts, why, _ = migrated("simplevla_rl_libero.sh", f"+data.num_trials_per_task={trials}")
    assert why == []
    assert [result.flat[f"env.{split}.state_ids"] for split in ("train", "eval")] == [states, states]
    (steps,) = [fact for fact in facts if fact.what == "steps"]
    assert (steps.kind, steps.theirs) == (BOUND, trials * 10 // 32 * 100)


@pytest.mark.parametrize("system", systems())
def test_every_compared_setting_names_its_source_file(system: str) -> None:
    from embodyrl_migrate.tables import read

    found = load_system(system)
    shown = {name for name in found.facts if name in read("ours.yaml") and not name.startswith("is_")}
    assert shown - set(found.sources) == set()
    assert set(found.sources) - shown == set()
    assert all(".py" in place or ".yaml" in place for place in found.sources.values())


@pytest.mark.parametrize("system", systems())
def test_comparison_covers_all_core_settings(system: str) -> None:
    core = """
    horizon group episodes optimizer_steps steps estimator divided_by_deviation loss aggregation clip_low clip_high
    dual_clip kl entropy filter old_logprob temperature top_k learning_rate schedule warmup weight_decay betas
    adam_eps gradient_clip reward validation_every validation_episodes
    """
    assert set(core.split()) - set(load_system(system).facts) == set()


RECIPES: dict[str, dict[str, Any]] = yaml.safe_load((DATA / "recipes.yaml").read_text())["recipes"]


@pytest.mark.parametrize("name", RECIPES)
def test_migrated_recipes_match_hand_computed_values(name: str) -> None:
    wanted = RECIPES[name]
    result, _, why, _ = migrated(wanted["base"], *wanted["overrides"])
    assert list(dict.fromkeys(map(subject, why))) == wanted.get("reasons", [])
    flat = {**result.flat, "groups": result.flat["env.train.total_num_envs"] * result.flat["algorithm.rollout_epoch"]}
    flat["groups"] /= flat["algorithm.group_size"]
    values = wanted.get("values", {})
    assert {key: flat[key] for key in values} == values
