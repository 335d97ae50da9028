"""Each command rejects keys of other commands and accepts all of its defaults."""

from pathlib import Path

import pytest

from embodyrl.cli.main import main
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.plan.saved import save_config

REFUSED = [
    ("eval", "data.path=x"),
    ("sft", "ckpt=x"),
    ("train", "env.eval.auto_reset=true"),
    ("train", "env.eval.use_fixed_reset_state_ids=true"),
    ("train", "env.eval.max_steps_per_rollout_epoch=9"),
    ("train", "data.image_aug=true"),
    ("train", "model=mlp model.unnorm_key=x"),
    ("train", "model=openvla model.use_proprio=true"),
]


@pytest.mark.parametrize(("command", "words"), REFUSED, ids=[f"{c} {w}" for c, w in REFUSED])
def test_keys_and_groups_of_other_components_are_rejected(command: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(command, words.split())
    (problem,) = caught.value.problems
    assert words.split()[-1].partition("=")[0] in problem
    assert "remove the key" in problem or "Did you mean" in problem


FINE = [
    ("train", "env.env_type=gym env.id=CartPole-v1 model=mlp"),  # on top of the default's keys
    ("sft", "model=mlp data.path=demos"),  # whose preset speaks of algorithm.update_epoch
    ("train", "algorithm=ppo algorithm.loss_type=sapo"),  # whose preset speaks of clips
    ("eval", "eval=libero_standard env=libero_10"),
    ("eval", "experiment=libero_laptop"),
    ("collect", "experiment=libero_laptop"),
    ("train", "model=random"),
    ("train", "env=text/copy model=causal_lm_tiny data.prompt_key=q"),
    ("sft", "data.path=rows.jsonl data.prompt_key=q"),
    ("sft", "data.path=demos actor.fsdp.size=2 faults.on_nonfinite=skip"),
    ("train", "runner.experiment_name=2024"),  # a number is a fine name
]


@pytest.mark.parametrize(("command", "words"), FINE, ids=[f"{c} {w}" for c, w in FINE])
def test_defaults_and_group_choices_load_from_a_saved_config(command: str, words: str, tmp_path: Path) -> None:
    if command == "collect" and "experiment" in words:
        with pytest.raises(ConfigError, match="experiment"):  # collect has no experiments
            load_config(command, words.split())
        return
    cfg = load_config(command, words.split())
    save_config(cfg, tmp_path / "config.yaml")
    assert dict(load_saved_config(tmp_path, [], command=command).leaves()) == dict(cfg.leaves())


NONSENSE = [
    "env.train.task_ids=[[1]]",
    "model=mlp model.hidden_sizes=[[1]]",
    "algorithm.rollout_epoch=1e10",
    "algorithm.rollout_epoch=10000000000",
    "env.train.total_num_envs=1000000000",
    "eval.episodes=1e14",
    "eval.episodes=100000000000000",
    "actor.optim.lr=1e300",
    f"seed={'9' * 5000}",
    f"runner.experiment_name={'x' * 300}",
    f"env.train.task_ids={'[' * 2000}1{']' * 2000}",
]


@pytest.mark.parametrize("words", NONSENSE, ids=[w[:50] for w in NONSENSE])
def test_malformed_override_gives_one_line_and_exit_code_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words.split(), "--dry-run"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("embodyrl: error: ")
    assert len(lines[0]) < 500


@pytest.mark.parametrize(
    ("words", "code", "fragment"),
    [
        ("train ckpt=/nope --dry-run", 6, "ckpt=/nope"),
        ("eval ckpt=/nope --dry-run", 6, "ckpt=/nope"),
        ("train runner.output_dir=/dev/null/x --dry-run", 2, "runner.output_dir=/dev/null/x"),
        ("sft data.path=/nope", 2, "/nope is not a folder"),
        ("sft data.path=/nope --dry-run", 2, "/nope is not a folder"),
    ],
)
def test_missing_paths_and_names_are_errors_before_the_start(words, code, fragment, capsys) -> None:
    assert main(words.split()) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert fragment in line


@pytest.mark.parametrize(
    ("name", "value"),
    [("env.env_type", "os:system"), ("algorithm.loss_type", "os:getcwd"), ("launcher.name", "os:abort")],
)
def test_non_component_objects_are_never_called(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"{name}={value}", "--dry-run"]) == 2
    assert value in capsys.readouterr().err


def test_config_of_an_older_version_loads(tmp_path: Path) -> None:
    """The config has keys of all components, and keys that were removed."""
    save_config(load_config("train", []), tmp_path / "config.yaml")
    with (tmp_path / "config.yaml").open("a") as file:
        file.write("custom: {}\ndata: {path: null, image_aug: true}\ncollect: {out: null}\n")
    assert load_saved_config(tmp_path, []).env.env_type == "tabletop"
