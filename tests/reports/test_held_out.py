"""Reports of evaluated episodes and of the overlap with training states."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from toy_runs import toy_config, toy_words, train_toy

from embodyrl.commands.banner import evaluation_banner_lines
from embodyrl.commands.export import export
from embodyrl.config.compose import flatten
from embodyrl.config.paths import assets_dir
from embodyrl.config.plain_yaml import read_plain_yaml
from embodyrl.config.settings import to_builtin
from embodyrl.data.layout import Card
from embodyrl.data.writer import DatasetWriter
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.plan.saved import ENVIRONMENT_FILE, EXPORTED_CONFIG, dump_config, save_config

SPLITS = ("env.train.state_ids=[2,3]", "env.eval.state_ids=[0,0]")
SUITES = ("libero_10", "libero_90", "libero_goal", "libero_object", "libero_spatial")


def lines(folder: Path, *overrides: str, command: str = "train") -> str:
    overrides += ("runner.val_check_interval=2",) * (command == "train")
    run_plan = build_run_plan(toy_config(folder, *overrides, command=command), training=command == "train")
    return "\n".join(text for _, text in evaluation_banner_lines(run_plan))


def test_training_reports_overlap_with_evaluation_states(tmp_path: Path) -> None:
    apart = lines(tmp_path, *SPLITS, "eval.episodes=3")
    assert apart == ("3 episodes, greedy actions, 1 initial states, initial states that training does not use")
    assert "warning: of these 4 initial states training uses 4;" in lines(tmp_path)
    assert "of these 3 initial states training uses 2;" in lines(tmp_path, SPLITS[0], "env.eval.state_ids=[1,3]")


def test_repeated_validation_states_are_reported() -> None:
    words = [
        "runner.val_check_interval=5",
        "eval.episodes=150",
        "env.eval.state_ids=[3000,3004]",
        "env.eval.task_ids=[0,1,2]",
    ]
    run_plan = build_run_plan(load_config("train", words), training=True)
    assert evaluation_banner_lines(run_plan)[0][1] == (
        "15 episodes, greedy actions, initial states that training does not use; "
        "150 episodes were requested, but the remaining episodes would be exact copies"
    )


def test_evaluation_reports_states_used_by_its_run(tmp_path: Path) -> None:
    run = train_toy(tmp_path, *SPLITS, "runner.val_check_interval=2", "eval.episodes=2", name="trained")
    ckpt = (f"ckpt={run}",)
    test = lines(tmp_path, *ckpt, "env.eval.state_ids=[1,1]", command="eval")
    assert f"none of these initial states is used by training of {run} or validation of {run}" in test
    both = lines(tmp_path, *ckpt, "env.eval.state_ids=[0,2]", command="eval")
    assert f"of these 3 initial states training of {run} uses 1, validation of {run} uses 1;" in both
    (unused,) = re.findall(r"env\.eval\.state_ids=\S+ selects unused states", both)
    assert "none of these" in lines(tmp_path, *ckpt, unused.split()[0], command="eval")
    # Also of the run that it started from.
    later = tmp_path / "later"
    (later / "checkpoints").mkdir(parents=True)
    splits = ("env.train.state_ids=[3,3]", "env.eval.state_ids=[0,0]", "runner.val_check_interval=2")
    second = load_config("train", toy_words(tmp_path, *ckpt, *splits))
    save_config(second, later / "config.yaml")
    chain = lines(tmp_path, f"ckpt={later}", "env.eval.state_ids=[2,2]", command="eval")
    assert f"none of these initial states is used by training of {later}" in chain
    assert f"training of {run} uses 1, validation of {run} uses 0;" in chain
    assert "unknown: the training data of assets/" in lines(tmp_path, "ckpt=assets/openvla_oft_tiny", command="eval")
    # An exported folder says it of itself, also in another place.
    exported = export(run, 2, tmp_path / "exported", overrides=["trust=true"])
    told = lines(tmp_path, f"ckpt={exported}", "env.eval.state_ids=[0,2]", command="eval")
    assert f"of these 3 initial states training of {exported} uses 1, validation of {exported} uses 1;" in told


@pytest.mark.parametrize(
    ("words", "states", "horizon"),
    [
        ("env=gym env.id=Pendulum-v1 env.train.max_episode_steps=200", [90_000, 94_999], 200),
        ("env=maniskill_bridge env.id=StackGreenCubeOnYellowCubeBakedTexInScene-v1", None, 60),
        ("env=libero_pro_object_task env.train.task_ids=[3]", [0, 9], 240),
        ("env.env_type=toy_env:FACTORY env.train.max_episode_steps=9 env.train.state_ids=null", None, 9),
    ],
)
def test_sft_runs_are_evaluated_on_held_out_states(words, states, horizon, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    save_config(load_config("sft", ["data.path=demos"]), tmp_path / "config.yaml")
    shown = load_config("collect", [*words.split(), "collect.out=demos"])
    (tmp_path / ENVIRONMENT_FILE).write_text(dump_config(shown, group="env"))
    env = load_config("eval", [f"ckpt={tmp_path}", "trust=true"], base=tmp_path / "config.yaml").env
    assert (env.eval.state_ids, env.eval.max_episode_steps) == (states, horizon)
    assert env.eval.task_ids == shown.env.train.task_ids
    assert env.env_type == shown.env.env_type


def test_dagger_runs_are_evaluated_on_held_out_states(tmp_path: Path) -> None:
    """Fails if states and horizon are those of the default environment."""
    (tmp_path / "checkpoints").mkdir()
    words = ["env=gym", "env.id=Pendulum-v1", "env.train.max_episode_steps=200", "model=mlp"]
    save_config(load_config("dagger", [*words, "data.path=a", "collect.out=b"]), tmp_path / "config.yaml")
    env = load_config("eval", [f"ckpt={tmp_path}"], base=tmp_path / "config.yaml").env
    assert (env.id, env.eval.state_ids, env.eval.max_episode_steps) == ("Pendulum-v1", [90_000, 94_999], 200)


def test_used_states_include_all_demonstrations(tmp_path: Path) -> None:
    """Includes `data.more` and `algorithm.demonstrations` as well as `data.path`."""
    env = build_run_plan(toy_config(tmp_path, command="eval"), training=False).env
    folders = [tmp_path / name for name in ("first", "more", "elsewhere")]
    for state, folder in enumerate(folders):
        shown = replace(env, name="another") if folder.name == "elsewhere" else env
        DatasetWriter(folder, Card(env=shown, fps=20, video=False, collected={"state_ids": [state, state]})).close()
    first, more, elsewhere = map(str, folders)

    def told(made: dict[str, object], states: str) -> str:
        run = tmp_path / "made"
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        (run / "config.yaml").write_text(json.dumps(made))
        return lines(tmp_path, f"ckpt={run}", f"env.eval.state_ids={states}", command="eval")

    learned = {"data": {"path": first, "more": [more, elsewhere]}}
    assert "of these 2 initial states demonstrations of" in told(learned, "[1,2]")
    assert "none of these initial states is used by demonstrations" in told(learned, "[2,3]")
    beside = toy_config(tmp_path, "env.train.state_ids=[3,3]").updated({"runner.val_check_interval": -1})
    replayed = to_builtin(beside) | {"algorithm": {"demonstrations": [more]}}
    assert "training of" in told(replayed, "[1,1]")
    assert re.search(r"uses 0, demonstrations of \S+ uses 1;", told(replayed, "[1,1]"))
    assert "unknown: " in told(learned | {"data": {"path": first, "more": ["gone"]}}, "[2,3]")
    validated = toy_config(tmp_path, "env.train.state_ids=[3,3]").updated({"runner.val_check_interval": 2})
    rounds = to_builtin(validated) | learned | {"dagger": {"rounds": 2}}
    del rounds["env"]["eval"]
    assert "training of" in told(rounds, "[1,2]")
    assert "validation of" not in told(rounds, "[1,2]"), "of samples, not of episodes"
    assert re.search(r"uses 0, demonstrations of \S+ uses 1;", told(rounds, "[1,2]"))
    start = tmp_path / "start"
    (start / "checkpoints").mkdir(parents=True)
    (start / "config.yaml").write_text(json.dumps({"data": {"path": more}}))
    began = told({"data": {"path": first}, "model": {"path": str(start)}}, "[1,1]")
    assert f"demonstrations of {start} uses 1;" in began, "also of the run that it started from"


def test_states_outside_the_evaluated_environment_are_ignored(tmp_path: Path) -> None:
    run = tmp_path / "more"
    (run / "checkpoints").mkdir(parents=True)
    words = ["env=libero_object", "model=openvla_oft_tiny", "runner.val_check_interval=5"]
    more = ["env.sampled_states=20", "env.train.state_ids=[45,69]", "env.eval.state_ids=[50,69]"]
    save_config(load_config("train", words + more), run / "config.yaml")
    words = [f"ckpt={run}", "env=libero_object", "env.eval.state_ids=[40,49]"]
    told = dict(evaluation_banner_lines(build_run_plan(load_config("eval", words), training=False)))["held out"]
    assert f"of these 100 initial states training of {run} uses 50, validation of {run} uses 0;" in told


def test_images_that_differ_from_training_images_give_a_warning() -> None:
    def told(*words: str) -> str | None:
        words = ("ckpt=assets/openvla_oft_tiny_object", *words)
        return dict(evaluation_banner_lines(build_run_plan(load_config("eval", words), training=False))).get(
            "rendering"
        )

    sizes = "env.init_params.camera_heights=128 env.init_params.camera_widths=128"
    assert "; env.render_profile=lean renders" in (told("env=libero_object") or "")
    typed = sizes.replace("128", "64").split()
    assert f"; env.render_profile=lean {sizes} renders" in (told("env=libero_object", *typed) or "")
    laptop = "experiment=libero_object_laptop"
    assert told(laptop) is None
    colors = "env.texture_colorspace"
    assert f"; {colors}=auto renders" in (told(laptop, f"{colors}=linear") or "")
    assert f"; env.render_profile=lean {colors}=auto renders" in (told(laptop, "eval=libero_pro") or "")
    assert told("env=tabletop", "model=openvla_oft_tiny") is None


def test_text_rows_are_identified_by_split_and_file(tmp_path: Path) -> None:
    """Rows have only numbers: fails if rows of another split, or of other data, are attributed to the run."""
    run, rows = tmp_path / "learned", tmp_path / "rows.jsonl"
    (run / "checkpoints").mkdir(parents=True)
    rows.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": "a"}) + "\n" for i in range(20)))
    other = rows.with_name("other.jsonl")
    other.write_text(rows.read_text())
    text = ("env=text/math", "model=causal_lm_tiny", "data.prompt_key=prompt", "data.answer_key=answer")
    save_config(load_config("train", [*text, f"data.path={rows}", "runner.val_check_interval=5"]), run / "config.yaml")

    def told(*words: str) -> str:
        cfg = load_config("eval", [f"ckpt={run}", *text, *words])
        return dict(evaluation_banner_lines(build_run_plan(cfg, training=False)))["held out"]

    assert told(f"data.path={rows}").startswith(f"warning: of these 2 initial states training of {run} uses 0, valid")
    half = told(f"data.path={rows}", "data.val_share=0.5")
    assert f"of these 10 initial states training of {run} uses 8, validation of {run} uses 2;" in half
    assert told(f"data.path={other}").startswith("unknown: ")


def test_used_states_include_validation_suites(tmp_path: Path) -> None:
    run = tmp_path / "across"
    (run / "checkpoints").mkdir(parents=True)
    words = ["env.eval.state_ids=[3000,3001]", "runner.val_suites=[base,colours]", "runner.val_check_interval=5"]
    save_config(load_config("train", words), run / "config.yaml")
    tasks = "env.eval.task_ids=[0,1,2]"
    cfg = load_config("eval", [f"ckpt={run}", *words[:2], tasks, "model.path=assets/openvla_oft_tabletop"])
    told = "\n".join(text for _, text in evaluation_banner_lines(build_run_plan(cfg, training=False)))
    assert f"of these 12 initial states training of {run} uses 0, validation of {run} uses 12;" in told
    shown = load_config(
        "eval", [f"ckpt={run}", "env.eval.state_ids=[0,1]", *words[1:2], "model.path=assets/openvla_oft_tabletop"]
    )
    told = "\n".join(text for _, text in evaluation_banner_lines(build_run_plan(shown, training=False)))
    assert f"training of {run} uses 6, validation of {run} uses 0;" in told, "training stays in the own suite"
    save_config(load_config("train", [*words, "eval.episodes=7"]), run / "config.yaml")
    told = "\n".join(text for _, text in evaluation_banner_lines(build_run_plan(cfg, training=False)))
    assert f"validation of {run} uses 7;" in told, "it was allowed more, and looked at these"
    save_config(load_config("train", [*words, "eval.episodes=null", "eval.episodes_per_task=1"]), run / "config.yaml")
    told = "\n".join(text for _, text in evaluation_banner_lines(build_run_plan(cfg, training=False)))
    assert f"validation of {run} uses 6;" in told, "one of each task"


WEIGHTS = sorted(folder.parent for folder in assets_dir().glob("*/model.safetensors"))


@pytest.mark.parametrize("folder", WEIGHTS, ids=lambda folder: folder.name)
def test_included_weights_declare_their_training_states(folder: Path) -> None:
    made = flatten(read_plain_yaml(folder / EXPORTED_CONFIG))
    env = made.get("env.robot", made.get("env.task_suite_name", made["env.env_type"]))
    name = re.sub("_(tabletop|soup|pusht_start)$", "", folder.name)
    model = "openvla_oft_tiny" if name.startswith("openvla") else name
    words = [f"ckpt=assets/{folder.name}", f"env={env}", f"model={model}"]
    if env == "pusht_relative":
        pytest.importorskip("gym_pusht")
        words.append("model.num_action_chunks=2")
    run_plan = build_run_plan(load_config("eval", words), training=False)
    told = " ".join(text for _, text in evaluation_banner_lines(run_plan))
    assert "unknown" not in told
    assert re.search(rf"training of assets/{folder.name} uses [1-9]", told) is None
    card = json.loads((folder / "card.json").read_text())
    assert card["model"]["weights"] == f"assets/{folder.name}"
    first, last = made["env.train.state_ids"]
    low, high = card["states"]["evaluation"]
    assert high < first or low > last


@pytest.mark.parametrize(
    "words",
    [
        *([f"env={suite}"] for suite in SUITES),
        ["experiment=libero_laptop"],
        ["experiment=libero_laptop_flow"],
        ["experiment=libero_laptop_long"],
        ["experiment=libero_object_laptop"],
        ["experiment=libero_spatial_laptop"],
        ["env=tabletop"],
        ["env=gym"],
        ["env=maniskill"],
    ],
)
def test_presets_reserve_states_for_validation_and_test(words: list[str]) -> None:
    env = load_config("train", words).env
    assert env.train.state_ids is not None
    assert env.eval.state_ids is not None
    (first, last), (low, high) = env.train.state_ids, env.eval.state_ids
    assert last < low or high < first
    total = {"tabletop": 4000, "gym": 100_000, "maniskill": 100_000}.get(env.env_type, 50)
    assert last - first + 1 + high - low + 1 < total


def test_official_protocol_evaluates_all_states() -> None:
    assert load_config("eval", ["env=libero_object", "eval=libero_standard"]).env.eval.state_ids is None
