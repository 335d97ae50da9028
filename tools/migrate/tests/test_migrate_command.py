"""The migrate command: exit codes, printed text, written files and the public cases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from embodyrl_migrate.command import main
from embodyrl_migrate.shell import read_shell
from embodyrl_migrate.source import read_source
from embodyrl_migrate.tables import MigrationError, load_system, systems
from embodyrl_migrate.translate import translate

import embodyrl
from embodyrl.config.compose import options

ROOT = Path(__file__).parents[3]
DATA = Path(__file__).parent / "data"
CASES = DATA / "cases"


class Outcome:
    """Exit code, screen and files of one run."""

    def __init__(self, code: int, shown: Any, folder: Path, name: str) -> None:
        self.code = code
        self.screen: str = shown.out + shown.err
        self.report = (folder / "experiment" / f"{name}.md").read_text()
        self._experiment = folder / "experiment" / f"{name}.yaml"

    @property
    def settings(self) -> dict[str, Any] | None:
        """The written experiment; None: none was written."""
        return yaml.safe_load(self._experiment.read_text()) if self._experiment.exists() else None


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def start(file: Path, *words: str) -> Outcome:
        code = main([str(file), *words, "--to", str(tmp_path)])
        return Outcome(code, capsys.readouterr(), tmp_path, file.stem)

    return start


REFUSED = {
    "01_cosmos_gym.toml": "a rollout backend that is not known (rollout.backend=gym)",
    "02_rlinf_temperature.yaml": "rollout.sampling_params.top_k=50",
    "04_rlinf_eval_only.yaml": "evaluation alone (runner.task_type=embodied_eval). Nearest: embodyrl eval",
    "09_simplevla_trials.sh": "fewer initial states than one batch",
    "12_verl_gsm8k.sh": "not known there: steps",
    "13_cosmos_pi05.toml": "differs: ratio level: each action number there, chunk_level here",
    "16_areal_multi_turn.yaml": "differs: turns: 2 there, 1 here",
    "17_verl_config_not_found.sh": "missing file: $COMMAND/examples/sglang_multiturn/config/gsm8k_multiturn_grpo.yaml",
}
ACCEPTED = {
    "03_rlinf_min_lr_rate.yaml": {"actor.optim.min_lr_ratio": 0.1, "actor.optim.schedule": "cosine"},
    "10_simplevla_unread.sh": {
        "algorithm.entropy_bonus": 0,
        "algorithm.update_epoch": 1,
        "actor.optim.schedule": "constant",
    },
}


def test_every_case_has_an_expected_outcome() -> None:
    assert {path.name for path in CASES.iterdir()} == set(REFUSED) | set(ACCEPTED)


@pytest.mark.parametrize("name", REFUSED)
def test_differing_config_exits_2_with_a_reason(run: Any, name: str) -> None:
    outcome = run(CASES / name)
    assert (outcome.code, outcome.settings) == (2, None)
    assert REFUSED[name] in outcome.screen
    assert REFUSED[name] in outcome.report


@pytest.mark.parametrize("name", ACCEPTED)
def test_equivalent_config_is_written(run: Any, tmp_path: Path, name: str) -> None:
    outcome = run(CASES / name)
    assert outcome.code == 0, outcome.screen
    cfg = embodyrl.compose("train", f"experiment={Path(name).stem}", config_dirs=[tmp_path])
    for key, value in ACCEPTED[name].items():
        section: Any = cfg
        for part in key.split("."):
            section = getattr(section, part)
        assert section == value, key


@pytest.mark.parametrize("name", ["12_verl_gsm8k.sh", "16_areal_multi_turn.yaml"])
def test_source_validation_settings_are_reported(run: Any, name: str) -> None:
    assert "differs: validation episodes: every row there" in run(CASES / name).screen


def test_nearest_flag_writes_the_experiment_and_lists_differences(run: Any) -> None:
    outcome = run(CASES / "02_rlinf_temperature.yaml", "--nearest")
    assert outcome.code == 0
    assert outcome.settings is not None
    assert outcome.settings["algorithm"]["sampling_params"]["temperature"] == 1.6
    assert "not the same experiment: differs: top k: 50 there, off here." in outcome.screen


def test_nearest_flag_writes_nothing_without_a_close_match(run: Any) -> None:
    for name in ("01_cosmos_gym.toml", "04_rlinf_eval_only.yaml", "17_verl_config_not_found.sh"):
        assert run(CASES / name, "--nearest").code == 2


def test_smaller_batch_limits_trials_to_their_initial_states(run: Any) -> None:
    outcome = run(CASES / "09_simplevla_trials.sh", "data.train_batch_size=8")
    assert outcome.code == 0, outcome.screen
    assert outcome.settings is not None
    assert outcome.settings["env"]["train"]["state_ids"] == [0, 3]


def test_written_experiment_does_not_repeat_defaults(run: Any, tmp_path: Path) -> None:
    outcome = run(DATA / "simplevla_rl_libero.sh")
    assert outcome.settings is not None
    assert "clip_ratio_low" not in outcome.settings.get("algorithm", {})
    cfg = embodyrl.compose("train", "experiment=simplevla_rl_libero", config_dirs=[tmp_path])
    assert (cfg.algorithm.loss.clip_ratio_low, cfg.algorithm.group_size, cfg.actor.optim.lr) == (0.2, 8, 4e-6)


def test_unsupported_keys_are_printed(run: Any) -> None:
    outcome = run(DATA / "simplevla_rl_libero.sh", "+trainer.nnodes=2", "+trainer.max_val_batches=3", "--nearest")
    assert "unsupported, without effect on the result: trainer.nnodes=2" in outcome.screen
    assert "not the same experiment: unsupported key: trainer.max_val_batches=3" in outcome.screen


def test_json_output_contains_the_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([str(CASES / "03_rlinf_min_lr_rate.yaml"), "--to", str(tmp_path), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (code, told["written"], told["layout"], told["reasons"]) == (0, True, "0.3", [])
    assert all(fact["source"] for fact in told["facts"])


def test_an_existing_experiment_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "experiment" / "roll_rlvr.yaml"
    target.parent.mkdir()
    target.write_text("mine")
    assert main([str(DATA / "roll_rlvr.yaml"), "--to", str(tmp_path)]) == 2
    assert target.read_text() == "mine"
    assert "exists" in capsys.readouterr().err


def test_migrate_module_is_executable(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "embodyrl_migrate", str(tmp_path / "none.yaml")]
    found = subprocess.run(words, cwd=ROOT / "tools" / "migrate", capture_output=True, text=True, timeout=100)
    assert (found.returncode, found.stderr) == (
        2,
        f"embodyrl-migrate: error: {tmp_path / 'none.yaml'}: no such file.\n",
    )


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ('[[ $kind == "b" ]]', "b"),
        ('[ "$kind" = "a" ]', "other"),
        ('[[ $kind != "a" ]]', "b"),
        ('[ -z "${EMPTY:-}" ]', "b"),
        ('[[ -n "${EMPTY:-}" ]]', "other"),
        ('[ "$1" = "x" ]', None),
    ],
)
def test_shell_conditions_are_evaluated(condition: str, taken: str | None) -> None:
    text = f"""kind=b
if {condition}; then
    lr=b
else
    lr=other
fi
python -m verl.trainer.main_ppo model.path=m/$kind optim.lr=$lr
"""
    script = read_shell(text)
    assert script.overrides[0] == "model.path=m/b"
    if taken is None:
        assert "a condition on arguments or the machine sets lr" in script.unclear[0]
    else:
        assert (script.overrides[1], script.unclear) == (f"optim.lr={taken}", [])


def test_two_training_commands_are_reported_as_ambiguous() -> None:
    text = "python -m verl.trainer.main_ppo a.b=1\npython -m verl.trainer.main_ppo a.b=2 c.d=3\n"
    assert "starts 2 commands" in read_shell(text).unclear[0]


def test_config_in_a_parent_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "run.yaml").write_text("data: {train_batch_size: 8}\n")
    (tmp_path / "run.sh").write_text(
        'HERE="$(pwd)"\npython -m verl.trainer.main_ppo --config-path="$HERE/config" --config-name=run data.x=1\n'
    )
    source = read_source(tmp_path / "run.sh")
    assert (source.values, source.missing) == ({"data.train_batch_size": 8, "data.x": 1}, [])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.yaml", "a: [", "not readable"),
        ("x.yaml", "a: 1\nb: 2", "too few of its keys"),
        ("x.yaml", "[1, 2]", "contains a list"),
        ("x.yaml", "5", "not readable"),
        ("x.toml", "a = ", "not readable"),
        ("x.sh", "echo hello", "starts no training"),
        ("x.yaml", "\0\1\2", "not readable"),
        ("ls", "#!\n", "starts no training"),
    ],
)
def test_unreadable_files_are_rejected(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(MigrationError, match=message):
        translate(read_source(tmp_path / name))
    (tmp_path / name).write_bytes(b"\x7fELF\xff\xfe" + bytes(range(256)))
    with pytest.raises(MigrationError, match="not readable"):
        read_source(tmp_path / name)


@pytest.mark.parametrize("system", systems())
def test_migration_tables_name_existing_groups(system: str) -> None:
    found = load_system(system)
    cases = [case for question in found.identity for case in question["cases"]]
    assert [case for case in cases if "refuse" in case and not case.get("nearest")] == []
    parts = [pair for part in (*cases, *found.keys["kinds"]) for pair in part.get("groups", {}).items()]
    assert [(group, option) for group, option in parts if option not in options(group)] == []


UNKNOWN = {
    "verl_grpo_gsm8k.yaml": ("actor_rollout_ref.rollout.name=surprise", "actor_rollout_ref.actor.strategy=surprise"),
    "roll_fsdp_grpo.yaml": (
        "actor_infer.strategy_args.strategy_name=surprise",
        "actor_train.strategy_args.strategy_name=surprise",
    ),
    "areal_cispo.yaml": ("rollout.backend=surprise", "actor.backend=surprise"),
    "cosmos_rl_vla.toml": ("rollout.backend=surprise", "train.train_policy.trainer_type=surprise"),
    "rlinf_libero_10_grpo.yaml": ("rollout.backend=surprise", "actor.training_backend=surprise"),
    "simplevla_rl_libero.sh": ("actor_rollout_ref.rollout.name=surprise", "actor_rollout_ref.actor.strategy=surprise"),
}
"""A recipe of each system, with its keys of the rollout backend and of the trainer."""


def test_unknown_backend_cases_cover_every_system() -> None:
    assert {next(system for system in systems() if name.startswith(system)) for name in UNKNOWN} == {*systems()}


@pytest.mark.parametrize(("name", "word"), [(name, word) for name, words in UNKNOWN.items() for word in words])
def test_unknown_backend_or_trainer_exits_2_with_nearest_flag(run: Any, name: str, word: str) -> None:
    outcome = run(DATA / name, f"+{word}" if name.endswith((".yaml", ".sh")) else word, "--nearest")
    assert (outcome.code, outcome.settings) == (2, None)
    assert f"({word})" in outcome.screen


def test_unwritable_target_folder_is_an_error_with_a_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    words = [str(Path(__file__).parent / "data" / "areal_ppo.yaml"), "--to", str(tmp_path / "file")]
    assert main(words) == 2
    assert f"{tmp_path / 'file'}" in (text := capsys.readouterr().err)
    assert "Not a directory. Choose another folder with --to DIR." in text
