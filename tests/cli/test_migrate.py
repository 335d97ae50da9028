"""Configs of other frameworks: every key accounted for, and the result is one of ours."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from processes import SOURCE
from settings import model_of

from embodyrl.cli.main import main
from embodyrl.cli.migrate import Migration, load_table, read_source, systems, translate
from embodyrl.config.shared import Precision
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import ActionKind, ActionSpace, EnvSpec

DATA = Path(__file__).parent / "migrate_data"
SOURCES = sorted(p for p in (*DATA.glob("*.yaml"), *DATA.glob("*.toml")) if p.stem != "verl_base")


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
    row = json.dumps({name: "1+1=" for name in ("question", "prompt", "problem", "instruction")} | {"answer": "#### 2"})
    (folder / "rows.jsonl").write_text(f"{row}\n" * 64)
    rows = str(folder / "rows.jsonl")
    return {"model.path": str(folder / "model"), "data.path": rows, "data.val_path": rows}


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_every_key_is_accounted_for_and_the_result_is_accepted(
    source: Path, tmp_path: Path, here: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", str(source), "--to", str(tmp_path), "--json"]) == 0
    account = json.loads(capsys.readouterr().out)
    keys = read_source(source, [])
    assert account["counts"]["unknown"] == 0, [k for k in account["keys"] if k["state"] == "unknown"]
    assert sorted(k["key"] for k in account["keys"]) == sorted(keys)
    assert source.stem.startswith(account["system"])
    page = (SOURCE / "docs" / "migrate.md").read_text()
    assert re.search(rf"^\| {source.name} \| [\w-]+ \| {len(keys)} (\| \d+ ){{4}}\| 0 \|$", page, re.MULTILINE)
    assert all(k["note"] for k in account["keys"] if k["state"] in ("changed", "not needed", "unsupported"))
    groups = yaml.safe_load((tmp_path / "experiment" / f"{source.stem}.yaml").read_text())["defaults"]
    # The engine of the source, vLLM, is an extra that may not be installed here.
    words = [*(f"{name}={path}" for name, path in here.items()), "rollout.backend=hf"]
    if {"override /env": "libero_10"} in groups:
        pytest.importorskip("libero")
        words = ["model.path=assets/openvla_oft_tiny", "model.unnorm_key=libero_10_no_noops"]
        words += ["model.is_lora=false", "model.lora.path=null"]
    word = [f"experiment={source.stem}", "--config-dir", str(tmp_path)]
    assert main(["train", *word, *words, "--dry-run"]) == 0, capsys.readouterr().err


def settings(name: str, *overrides: str) -> tuple[Migration, dict]:
    (source,) = (p for p in SOURCES if p.stem == name)
    result = translate(read_source(source, list(overrides)))
    return result, result.settings


def test_sizes_of_a_step_are_those_of_the_source() -> None:
    _, found = settings("verl_grpo_gsm8k")
    assert found["algorithm.group_size"] == 4
    assert found["env.train.total_num_envs"] * found["algorithm.rollout_epoch"] == 32 * 4
    assert found["actor.global_batch_size"] == 16 * 4, "prompts there, samples here"
    _, found = settings("roll_rlvr")
    assert found["actor.global_batch_size"] == 1 * 32
    _, found = settings("areal_rloo_m2po")
    assert found["actor.global_batch_size"] == 8 * 8 // 2
    assert found["algorithm.adv_type"] == "rloo"


def test_meanings_are_turned_where_they_are_turned_around() -> None:
    _, found = settings("cosmos_rl_gsm8k")
    assert found["algorithm.normalize_advantages"] is False
    assert found["algorithm.kl_penalty_type"] == "k3_unbiased"
    assert found["model.is_lora"] is True
    _, found = settings("verl_ppo_gspo")
    assert (found["algorithm.kl_in_reward"], found["algorithm.kl_beta"], found["algorithm.kl_target"]) == (
        True,
        0.005,
        0.1,
    )
    assert found["algorithm.loss_type"] == "gspo"


def test_a_defaults_list_and_overrides_are_followed() -> None:
    _, found = settings("verl_grpo_gsm8k", "actor_rollout_ref.actor.optim.lr=3e-6", "+actor_rollout_ref.rollout.n=8")
    assert found["data.prompt_key"] == "question", "from the inherited file"
    assert found["actor.optim.lr"] == pytest.approx(3e-6)
    assert found["algorithm.group_size"] == 8
    _, found = settings("rlinf_libero_10_grpo")
    assert found["env.reward_coef"] == 5.0, "from the environment's file"


def test_an_unknown_key_and_a_refused_value_are_shown_not_dropped() -> None:
    result, found = settings("verl_ppo_gspo", "trainer.surprise=1", "actor_rollout_ref.actor.optim.lr=-1")
    states = {v.key: v for v in result.verdicts}
    assert states["trainer.surprise"].state == "unknown"
    assert states["actor_rollout_ref.actor.optim.lr"].state == "unsupported"
    assert "refused" in states["actor_rollout_ref.actor.optim.lr"].note
    assert "actor.optim.lr" not in found


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "not readable"), ("defaults: [nowhere]\na: 1", "defaults list"), ("a: 1\nb: 2", "too few of its keys")],
)
def test_files_that_cannot_be_translated(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        translate(read_source(tmp_path / "x.yaml", []))


def test_an_existing_experiment_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "experiment" / "roll_rlvr.yaml"
    target.parent.mkdir()
    target.write_text("mine")
    assert main(["migrate", str(DATA / "roll_rlvr.yaml"), "--to", str(tmp_path)]) == 2
    assert target.read_text() == "mine"
    assert "exists" in capsys.readouterr().err


def test_every_target_of_the_tables_is_a_key_of_ours() -> None:
    from embodyrl.plan.roots import is_known

    for system in systems():
        for key, entry in load_table(system)["keys"].items():
            rule = {"to": entry} if isinstance(entry, str) else entry
            targets = rule.get("to", [])
            targets = [targets] if isinstance(targets, str) else targets
            sets = [v for v in rule.get("values", {}).values() if isinstance(v, dict)]
            for target in (*targets, *rule.get("also", {}), *(t for one in sets for t in one)):
                assert target.startswith(("@", "group/")) or is_known(target), (key, target)


def test_the_written_experiment_is_what_was_judged(tmp_path: Path) -> None:
    shutil.copy(DATA / "roll_fsdp_grpo.yaml", tmp_path / "roll.yaml")
    assert main(["migrate", str(tmp_path / "roll.yaml"), "--to", str(tmp_path / "conf")]) == 0
    cfg = load_config("train", ["experiment=roll"], config_dirs=[tmp_path / "conf"])
    assert cfg.algorithm.loss_type == "gspo"
    assert cfg.algorithm.clip_ratio_high == 0.0004
    assert (cfg.actor.global_batch_size, cfg.actor.micro_batch_size) == (16, 2)
