"""Configs of other frameworks: every key accounted for, what decides a result is kept, the rest is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import SOURCE
from settings import model_of

from embodyrl.cli.main import main
from embodyrl.cli.migrate import side_by_side
from embodyrl.cli.migration.shell import read_shell
from embodyrl.cli.migration.source import Source, read_source
from embodyrl.cli.migration.tables import System, find, load_system, systems
from embodyrl.cli.migration.translate import Migration, translate
from embodyrl.config.shared import Precision
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import ActionKind, ActionSpace, EnvSpec

DATA = Path(__file__).parent / "migrate_data"
EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load((DATA / "expected.yaml").read_text())
"""By file: `facts`, what decides the result in both systems' terms, worked out by hand, or why it is `refused`."""
SAME = [name for name, wanted in EXPECTED.items() if "facts" in wanted]
REFUSED = [name for name, wanted in EXPECTED.items() if "refused" in wanted]
ACTOR = "actor_rollout_ref.actor"
REFERENCES = sorted(p.name for p in DATA.glob("*_reference.*"))


@cache
def migrated(name: str, *overrides: str, nearest: bool = False) -> tuple[Migration, Source]:
    source = read_source(DATA / name, overrides)
    return translate(source, nearest=nearest), source


def settings(name: str, *overrides: str) -> dict[str, Any]:
    return migrated(name, *overrides)[0].settings


@pytest.fixture(scope="session")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a migrated text config names and this machine lacks: a language model's folder, questions and answers."""
    folder = tmp_path_factory.mktemp("text")
    cfg = model_of(model_type="causal_lm_tiny", precision=Precision.fp32, num_action_chunks=4)
    space = ActionSpace(kind=ActionKind.text)
    env = EnvSpec(name="text/toy", action_dim=1, tasks=("toy",), states_per_task=(1,), action_space=space)
    request = PolicyRequest(env=env, value_dim=0, temperature=1.0, device="cpu", seed=0)
    (folder / "model").mkdir()
    POLICIES.get(cfg.model_type).build(cfg, request).save(folder / "model")
    names = ("question", "prompt", "problem", "messages")
    row = dict.fromkeys(names, "1+1=") | {"reward_model": {"ground_truth": "#### 2"}}
    row |= dict.fromkeys(("answer", "ground_truth"), "#### 2")
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 64)
    rows = str(folder / "rows.jsonl")
    return {"model.path": str(folder / "model"), "data.path": rows, "data.val_path": rows}


@pytest.mark.parametrize("name", SAME)
def test_what_decides_the_result_is_kept(name: str) -> None:
    """Both sides: the source's is worked out from facts.yaml, ours from the config that the key tables make."""
    result, _ = migrated(name)
    facts = {fact.what: fact for fact in side_by_side(result)}
    assert not result.refused
    assert [fact.line() for fact in facts.values() if fact.is_same is False] == []
    ours = {what: fact.ours for what, fact in facts.items()}
    for what, value in EXPECTED[name]["facts"].items():
        # Lines that are off in both are not shown.
        assert ours.get(what, "off") == (pytest.approx(value) if isinstance(value, float) else value), what
    for key, value in EXPECTED[name].get("settings", {}).items():
        assert result.settings[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    assert {key: result.groups[key] for key in EXPECTED[name].get("groups", {})} == EXPECTED[name].get("groups", {})


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_the_same_experiment_is_refused_with_what_is_nearest(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        migrated(name)
    wanted = EXPECTED[name]["refused"]
    assert [line.split(": ")[1] for line in refused.value.problems] == list(wanted)
    for line, words in zip(refused.value.problems, wanted.values(), strict=True):
        assert line.startswith("this cannot be the same experiment: ")
        assert words in line
        assert "Nearest: " in line


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("python3 -m recipe.flowrl.main_flowrl", "task: a trainer of a recipe's own"),
        ("python3 -m recipe.one_step_off_policy.main_ppo", "task: a trainer of a recipe's own"),
        (
            "python3 -m verl.trainer.main_ppo algorithm.rollout_correction.rollout_rs=geometric",
            "algorithm: answers left",
        ),
        ("python3 -m verl.trainer.main_ppo", None),
    ],
)
def test_what_a_script_starts_says_what_is_trained(tmp_path: Path, line: str, why: str | None) -> None:
    words = "algorithm.adv_estimator=grpo data.train_files=data/math.parquet actor_rollout_ref.model.path=m"
    (tmp_path / "run.sh").write_text(f"{line} {words}\n")
    source = read_source(tmp_path / "run.sh")
    if why is None:
        assert translate(source).groups["algorithm"] == "grpo"
        return
    with pytest.raises(ConfigError, match=why):
        translate(source)


@pytest.mark.parametrize(
    ("name", "word", "why"),
    [
        ("rlinf_math.yaml", "+algorithm.max_num_gen_batches=3", "algorithm: further batches"),
        ("rlinf_math.yaml", "+reward.len_reward_penalty=0.1", "reward: a penalty for length"),
        ("rlinf_math.yaml", "algorithm.loss_type=drpo", "algorithm: a loss that is not here"),
        (
            "rlinf_math.yaml",
            "+algorithm.importance_sampling_fix=true",
            "algorithm: importance weights on the advantages",
        ),
        ("rlinf_async.yaml", "rollout.recompute_logprobs=false", "estimated, not recomputed"),
        ("verl_tis.sh", "+algorithm.rollout_correction.rollout_is_batch_normalize=true", "divided by their mean"),
        ("verl_tis.sh", "algorithm.rollout_correction.rollout_is_threshold=0.5_3.0", "with a lower bound"),
        ("verl_tis.sh", "+algorithm.rollout_correction.rollout_token_veto_threshold=1e-4", "their least likely token"),
        ("verl_older_is.sh", "algorithm.rollout_is_mode=mask", "with a lower bound"),
        ("roll_correction.yaml", "train_infer_correction.filters=[{enabled: true}]", "tokens left out by their ratio"),
        ("roll_correction.yaml", "train_infer_correction.is_weight.weight_type=segment", "weights of segments"),
        ("verl_rloo.sh", "actor_rollout_ref.actor.use_kl_loss=true", "a KL in the loss and another one in the reward"),
        ("roll_correction.yaml", "+use_rollout_importance_sampling=true", "keys of an older version"),
        ("areal_rejection.yaml", "actor.rejection_sampling.metric=kl_k2", "left out by a divergence"),
        ("areal_rejection.yaml", "+actor.rejection_sampling.lower=0.5", "with a lower bound"),
        ("areal_rejection.yaml", "+actor.rejection_sampling.agg=max", "their largest ratio"),
        ("simplevla_rl_libero.sh", "+reward.subgoal.enabled=True", "reward: rewards beside success"),
        ("simplevla_rl_libero.sh", "+data.task_sampling.enabled=True", "algorithm: tasks drawn by how often"),
    ],
)
def test_what_is_added_to_a_loss_and_is_not_here_is_refused(name: str, word: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        migrated(name, word)


@pytest.mark.parametrize(
    ("name", "word", "key", "state"),
    [
        ("verl_tis.sh", "trainer.test_freq=5", "actor_rollout_ref.rollout.val_kwargs.top_p", "unsupported"),
        ("verl_tis.sh", "trainer.test_freq=5", "actor_rollout_ref.rollout.val_kwargs.top_k", "mapped"),
        ("areal_cispo.yaml", "actor.eps_clip=0.9", "evaluator.freq_epochs", "unsupported"),
        (
            "verl_megatron.sh",
            "+actor_rollout_ref.actor.strategy=fsdp",
            "actor_rollout_ref.actor.optim.min_lr",
            "not needed",
        ),
    ],
)
def test_what_a_validation_or_a_schedule_loses_is_said(name: str, word: str, key: str, state: str) -> None:
    result, _ = migrated(name, word)
    assert next(verdict.state for verdict in result.verdicts if verdict.key == key) == state


def test_the_loss_of_the_bypass_is_no_other_loss() -> None:
    words = [f"{ACTOR}.policy_loss.loss_mode=bypass_mode", "+algorithm.rollout_correction.loss_type=ppo_clip"]
    handed_on = f"+{ACTOR}.policy_loss.rollout_correction=${{algorithm.rollout_correction}}"
    result, _ = migrated("verl_bypass_gspo.sh", *words, handed_on)
    assert result.settings["algorithm.loss_type"] == "ppo_clip"
    assert [result.counts[state] for state in ("unsupported", "unknown")] == [0, 0]


def test_what_is_weighed_against_rewards_of_twice_the_span_is_halved() -> None:
    """verl's dapo manager: -1 and 1; KL and penalty are there in these units."""
    long = "reward_model.reward_kwargs.overlong_buffer_cfg.enable=True"
    for manager, span in (("dapo", 2), ("naive", 1)):
        found = settings("verl_ray_submit.sh", long, f"reward_model.reward_manager={manager}")
        assert found["algorithm.kl_beta"] == 0.005 / span
        assert (found["reward.overlong_buffer"], found["reward.overlong_penalty"]) == (1024, 1 / span)
    newer = ("reward.reward_kwargs.overlong_buffer_cfg.enable=True", "reward.reward_kwargs.overlong_buffer_cfg.len=8")
    factor = "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=3"
    found = settings("verl_rloo.sh", *newer, factor, "reward.reward_manager.name=dapo")
    assert (found["algorithm.kl_beta"], found["reward.overlong_penalty"]) == (0.001, 1.5)


def test_a_scheduler_that_steps_once_a_training_step_is_counted_in_ours() -> None:
    """RLinf: 2 minibatches a training step, so 7 of its warm-up steps are 14 optimizer steps."""
    assert settings("rlinf_stop.yaml", "+actor.optim.lr_warmup_steps=7")["actor.optim.warmup_steps"] == 14
    assert settings("rlinf_spatial_pi05.yaml")["actor.optim.warmup_steps"] == 0, "there none, flow policies' 10 here"


def test_a_silent_file_means_what_the_source_takes_then() -> None:
    """Not what ours takes: gamma 0.99, lambda 0.95 and no dual clip."""
    silent = ("~algorithm.gamma", "~algorithm.gae_lambda", "~algorithm.clip_ratio_c", "~algorithm.group_size")
    found = settings("rlinf_goal_ppo.yaml", *silent)
    assert [found[f"algorithm.{key}"] for key in ("gamma", "gae_lambda", "clip_ratio_c", "group_size")] == [1, 1, 3, 8]
    assert settings("rlinf_goal_ppo.yaml", "algorithm.clip_ratio_c=null")["algorithm.clip_ratio_c"] is None


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("rlinf_libero_10_grpo.yaml", "seq-mean-token-mean"),
        ("rlinf_goal_ppo.yaml", "token-mean"),
        ("rlinf_math.yaml", "token-mean"),
    ],
    ids=["episodes end", "slots refill", "text"],
)
def test_episodes_that_end_are_divided_by_their_length(name: str, wanted: str) -> None:
    assert settings(name)["algorithm.loss_agg_func"] == wanted


def test_weights_without_a_cap_are_kept() -> None:
    found = settings("rlinf_async.yaml", "~algorithm.behave_weight_threshold")
    assert found["algorithm.behave_weight_threshold"] == 1000000
    assert found["algorithm.behave_weight_mode"] == "truncate"


def test_a_product_of_ratios_is_not_their_mean() -> None:
    assert (
        settings("areal_rejection.yaml", "+actor.rejection_sampling.agg=sum")["algorithm.behave_weight_level"]
        == "sequence"
    )


@pytest.mark.parametrize("name", [*SAME, *REFERENCES])
def test_every_key_is_accounted_for(name: str) -> None:
    result, source = migrated(name, nearest=name in REFERENCES)
    account = [v for v in result.verdicts if not v.is_default]
    assert [v.key for v in account] == list(source.values)
    assert [v.key for v in account if v.state == "unknown"] == []
    assert all(v.note for v in account if v.state in ("changed", "not needed", "unsupported"))
    assert result.system.folder == next(s for s in systems() if name.startswith(s))
    if name in REFERENCES:
        assert sum(result.counts.values()) == EXPECTED[name]["keys"]
        page = (SOURCE / "docs" / "howto" / "migrate.md").read_text()
        numbers = " | ".join(str(result.counts[state]) for state in list(result.counts)[:4])
        assert f"| {result.system.name} | {EXPECTED[name]['keys']} | {numbers} |" in page


@pytest.mark.parametrize("name", ["verl_grpo_gsm8k.yaml", "rlinf_libero_10_grpo.yaml"])
def test_a_written_experiment_trains(
    name: str, tmp_path: Path, here: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", str(DATA / name), "--to", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["counts"]["unknown"] == 0
    assert all(fact["same"] is not False for fact in told["facts"])
    # The engine of the source, vLLM, is an extra that may not be installed here.
    words = [*(f"{key}={path}" for key, path in here.items()), "rollout.backend=hf"]
    if name.startswith("rlinf"):
        pytest.importorskip("libero")
        words = ["model.path=assets/openvla_oft_tiny", "model.unnorm_key=libero_10_no_noops"]
    word = [f"experiment={Path(name).stem}", "--config-dir", str(tmp_path)]
    assert main(["train", *word, *words, "--dry-run"]) == 0, capsys.readouterr().err


def test_meanings_are_turned_where_they_are_turned_around() -> None:
    found = settings("cosmos_rl_gsm8k.toml")
    assert found["algorithm.normalize_advantages"] is False
    assert found["algorithm.kl_penalty_type"] == "k3_unbiased"
    found = settings("verl_ppo_gspo.yaml")
    wanted = {"algorithm.kl_in_reward": True, "algorithm.kl_beta": 0.005, "algorithm.kl_target": 0.1}
    assert {key: found[key] for key in wanted} == wanted


def test_a_loss_at_another_temperature_than_the_samples_is_shown() -> None:
    result, _ = migrated("cosmos_rl_hub.toml", "train.train_policy.temperature=0.9")
    (line,) = [fact for fact in side_by_side(result) if fact.is_same is False]
    assert (line.what, line.theirs, line.ours) == ("loss temperature", 0.9, 1.0)


def test_what_has_an_effect_there_and_none_here_is_no_detail() -> None:
    """Groups are left out before they are whitened over the batch: not with reinforce_pp here."""
    result, _ = migrated("roll_filter.yaml", "adv_estimator=reinforce", "whiten_advantages=true")
    key = "rewards.math_rule.query_filter_config.type"
    assert [v.state for v in result.verdicts if v.key == key] == ["unsupported"]
    assert [fact.what for fact in side_by_side(result) if fact.is_same is False] == ["filter"]


def test_a_defaults_list_and_overrides_are_followed() -> None:
    found = settings("verl_grpo_gsm8k.yaml", "actor_rollout_ref.actor.optim.lr=3e-6", "+actor_rollout_ref.rollout.n=8")
    assert found["data.prompt_key"] == "prompt", "from the inherited file"
    assert found["actor.optim.lr"] == pytest.approx(3e-6)
    assert found["algorithm.group_size"] == 8
    assert settings("rlinf_libero_10_grpo.yaml")["env.reward_coef"] == 5.0, "from the environment's file"


def test_an_unknown_key_and_a_refused_value_are_shown_not_dropped() -> None:
    words = ("trainer.surprise=1", "actor_rollout_ref.actor.optim.lr=-1")
    result, _ = migrated("verl_ppo_gspo.yaml", *words)
    states = {v.key: v for v in result.verdicts}
    assert states["trainer.surprise"].state == "unknown"
    assert states["actor_rollout_ref.actor.optim.lr"].state == "unsupported"
    assert "refused" in states["actor_rollout_ref.actor.optim.lr"].note
    assert "actor.optim.lr" not in result.settings
    assert [fact.what for fact in side_by_side(result) if fact.is_same is False] == ["learning rate"]


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ('[[ $kind == "b" ]]', "b"),
        ('[ "$kind" = "a" ]', "other"),
        ('[[ $kind != "a" ]]', "b"),
        ('[ -z "${NOBODY:-}" ]', "b"),
        ('[[ -n "${NOBODY:-}" ]]', "other"),
        ('[ "$1" = "x" ]', "other"),
    ],
    ids=["equal", "not equal", "unequal", "empty", "not empty", "unknown: the last one holds"],
)
def test_conditions_that_a_script_decides_itself_are_followed(condition: str, taken: str) -> None:
    text = f"""kind=b
if {condition}; then
    lr=b
    if [[ $kind == "a" ]]; then
        lr=a
    elif [[ $kind == "c" ]]; then
        lr=c
    fi
else
    lr=other
fi
BLOCK="
    model.path=m/$kind \\
    $NOBODY \\
    optim.lr=$lr"
python -m verl.trainer.main_ppo $BLOCK
"""
    assert read_shell(text).words == ["model.path=m/b", f"optim.lr={taken}"]


def test_unknown_keys_are_named_on_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of them may be what makes the experiment."""
    words = ["migrate", str(DATA / "verl_ppo_gspo.yaml"), "actor_rollout_ref.actor.surprise=1", "--to", str(tmp_path)]
    assert main(words) == 0
    assert "unknown actor_rollout_ref.actor.surprise=1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.yaml", "a: [", "not readable"),
        ("x.yaml", "a: 1\nb: 2", "too few of its keys"),
        ("x.yaml", "[1, 2]", "holds a list"),
        ("x.toml", "a = ", "not readable"),
        ("x.sh", "echo hello", "starts no training"),
        ("x.yaml", "\0\1\2", "not readable"),
        ("ls", "#!\n", "starts no training"),
    ],
)
def test_files_that_cannot_be_translated(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        translate(read_source(tmp_path / name))
    (tmp_path / name).write_bytes(b"\x7fELF\xff\xfe" + bytes(range(256)))
    with pytest.raises(ConfigError, match="not readable"):
        read_source(tmp_path / name)


def test_an_existing_experiment_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "experiment" / "roll_rlvr.yaml"
    target.parent.mkdir()
    target.write_text("mine")
    assert main(["migrate", str(DATA / "roll_rlvr.yaml"), "--to", str(tmp_path)]) == 2
    assert target.read_text() == "mine"
    assert "exists" in capsys.readouterr().err


def test_what_is_nearest_is_written_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "roll_reference.yaml"
    assert main(["migrate", str(DATA / name), "--to", str(tmp_path)]) == 2
    told = capsys.readouterr().err.splitlines()[0]
    assert re.match(r"embodyrl: error: this cannot be the same experiment: algorithm: PPO with a critic", told)
    assert main(["migrate", str(DATA / name), "--to", str(tmp_path), "--nearest"]) == 0
    assert capsys.readouterr().out.startswith("not the same experiment: algorithm: PPO with a critic")
    written = (tmp_path / "experiment" / "roll_reference.yaml").read_text()
    assert "# Not the same experiment: algorithm" in written
    assert "override /algorithm: ppo" in written


@pytest.mark.parametrize("system", systems())
def test_every_target_of_the_tables_is_a_key_of_ours(system: str) -> None:
    from embodyrl.plan.keys import is_known

    found = load_system(system)
    rules = [one for entry in found.keys["keys"].values() for one in (entry if isinstance(entry, list) else [entry])]
    targets: list[str] = []
    for rule in ({"to": one} if isinstance(one, str) else one for one in rules):
        named = rule.get("to", [])
        targets += [named] if isinstance(named, str) else named
        sets = [value for value in rule.get("values", {}).values() if isinstance(value, dict)]
        targets += [*rule.get("also", {}), *(key for one in sets for key in one)]
    cases = [case for question in found.identity for case in question["cases"]]
    targets += [key for part in (*cases, *found.keys["kinds"]) for key in part.get("settings", {})]
    assert [key for key in targets if not key.startswith(("@", "group/")) and not is_known(key)] == []
    assert all("nearest" in case for case in cases if "refuse" in case)
    groups = [
        (group, option) for part in (*cases, *found.keys["kinds"]) for group, option in part.get("groups", {}).items()
    ]
    assert [pair for pair in groups if not (SOURCE / "conf" / pair[0] / f"{pair[1]}.yaml").is_file()] == []


def test_the_counts_of_the_comparison_are_those_of_the_tables() -> None:
    page = (SOURCE / "docs" / "reference" / "compared.md").read_text()
    for name in REFERENCES:
        system = load_system(name.partition("_reference")[0])
        deciding = {key for q in system.identity for case in q["cases"] for key in case.get("when", {})}
        found = Counter(_kind(system, key, deciding) for key in read_source(DATA / name).values)
        numbers = f"{found['supported']} | {found['equivalent']} | {found['refused']}"
        assert f"| {system.name} | {system.keys['version']} | {sum(found.values())} | {numbers} |" in page


def _kind(system: System, key: str, deciding: set[str]) -> str:
    state, entry = find(system.keys, key)
    if state == "mapped":
        rules = entry if isinstance(entry, list) else [entry]
        return "equivalent" if any(isinstance(rule, dict) and "note" in rule for rule in rules) else "supported"
    return "supported" if key in deciding else "equivalent" if state == "not needed" else "refused"


def test_the_written_experiment_is_what_was_judged(tmp_path: Path) -> None:
    shutil.copy(DATA / "roll_fsdp_grpo.yaml", tmp_path / "roll.yaml")
    assert main(["migrate", str(tmp_path / "roll.yaml"), "--to", str(tmp_path / "conf")]) == 0
    cfg = load_config("train", ["experiment=roll"], config_dirs=[tmp_path / "conf"])
    assert cfg.algorithm.loss_type == "gspo"
    assert cfg.algorithm.clip_ratio_high == 0.0004
    assert (cfg.actor.global_batch_size, cfg.actor.micro_batch_size) == (16, 2)
