"""`check-env` passes on valid environments and reports each seeded fault by its own check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doubles import ScriptedSims, steps_of
from faulty_env import CHECK_OF_FAULT
from processes import start_cli, wait_until
from settings import env_of

from embodyrl.cli.main import main
from embodyrl.envs.check import CHECKS, check_env
from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import EnvSettings
from embodyrl.plan.config import load_config

pytestmark = pytest.mark.integration


class ScriptedFactory:
    settings = EnvSettings

    def validate(self, cfg: EnvSettings) -> list[str]:
        return []

    def _sims(self) -> ScriptedSims:
        return ScriptedSims([steps_of([0, 0, 0.5, 1], success=[3], terminated=[3])] * 4, states_per_task=2)

    def spec(self, cfg: EnvSettings, context: EnvContext):
        return self._sims().spec

    def make(self, cfg: EnvSettings, context: EnvContext) -> ChunkedEnv:
        return ChunkedEnv(self._sims(), context.num_envs, use_rel_reward=True, reward_coef=1.0)


SCRIPTED = ScriptedFactory()


def failed(cfg: EnvSettings, **options) -> dict[str, str]:
    """Return what each failed check found."""
    found = list(check_env(cfg, **options))
    assert [f.check for f in found] == list(CHECKS)
    return {f.check: str(f.violations[0]) for f in found if f.level == "FAIL"}


def warned(cfg: EnvSettings) -> list[str]:
    """Return the checks that warn for a valid environment."""
    found = list(check_env(cfg))
    assert {f.level for f in found} <= {"ok", "warn"}
    return [f.check for f in found if f.level == "warn"]


def levels(cfg: EnvSettings) -> set[str]:
    return {f.level for f in check_env(cfg)}


@pytest.mark.parametrize("plant", CHECK_OF_FAULT)
def test_each_seeded_fault_is_detected_only_by_its_own_check(plant):
    cfg = env_of(env_type="faulty_env:FACTORY", kwargs={"plant": plant, "tasks": 2})
    # All reset ids may begin alike: some environments have one start.
    found = warned(cfg) if plant == "reset_id_ignored" else list(failed(cfg))
    assert found == [CHECK_OF_FAULT[plant]]


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ("heavy_import_in_validate", "validate: expected no heavy import; import in make or later, found gymnasium"),
        (
            "one_text_instead_of_lines",
            "validate: expected a list of strings, empty if the config is valid, found 'colors are",
        ),
        ("one_count_too_many", "spec.states_per_task: expected 2 numbers, one per task, found 3"),
        ("nan_in_state", "observe: state[0]: expected a finite number, found nan"),
        ("row_not_written", "image of camera 'front': expected every pixel written"),
        ("wrong_instruction", "instruction: expected spec.tasks[1], 'go left', found 'go right'"),
        ("reward_in_float64", "step_chunk: reward: expected float32 (2, 4), found float64 (2, 4)"),
        ("channels_first", "render: expected uint8 (H, W, 3), found uint8 (3, 16, 24)"),
        ("last_state_missing", "reset: expected no error, found KeyError: 3 (faulty_env.py:"),
    ],
)
def test_violation_contains_field_expected_and_actual_value(plant, said):
    cfg = env_of(env_type="faulty_env:FACTORY", kwargs={"plant": plant, "tasks": 2})
    assert said in failed(cfg)[CHECK_OF_FAULT[plant]]


def test_environment_without_seeded_fault_passes():
    assert levels(env_of(env_type="faulty_env:FACTORY", kwargs={"plant": "none", "tasks": 2})) == {"ok"}


@pytest.mark.parametrize(
    "cfg",
    [
        env_of(env_type="toy_env:FACTORY"),
        env_of(env_type="toy_env:FACTORY", kwargs={"tasks": 3, "task_limit": 1}),
        env_of(env_type="test_check_env:SCRIPTED"),
        load_config("check-env", ["env=tabletop"]).env,
        load_config("check-env", ["env=tabletop", "env.init_params.camera_names=[wrist]"]).env,
        load_config("check-env", ["env=gym", "env.id=CartPole-v1"]).env,
        load_config("check-env", ["env=gym", "env.id=Pendulum-v1"]).env,
    ],
    ids=["toy", "toy, 3 tasks", "scripted", "tabletop", "tabletop, one camera", "discrete actions", "bounded actions"],
)
def test_valid_environments_pass(cfg):
    assert levels(cfg) == {"ok"}


def test_hanging_simulator_is_reported_and_later_checks_skipped():
    cfg = env_of(env_type="toy_env:FACTORY", kwargs={"fault": "hang", "where": "step"})
    found = {f.check: f for f in check_env(cfg, timeout_s=3.0)}
    assert "TimeoutError: the check did not finish within 3 s" in str(found["step"].violations[0])
    assert (found["flags"].level, found["flags"].note) == ("skip", "needs step")
    assert found["close"].level == "ok"


def test_killed_check_leaves_no_simulator_process(tmp_path):
    marker = tmp_path / "hangs"
    kwargs = (f"env.kwargs.once={marker}", "env.kwargs.fault=hang", "env.kwargs.where=step")
    command = start_cli("check-env", "env.env_type=toy_env:FACTORY", *kwargs, cwd=tmp_path)
    try:
        command.wait_for(marker)
        found = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
        assert found
        command.process.kill()
        command.wait()
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in found), 5.0)
    finally:
        command.stop()


def test_text_tasks_are_rejected_with_one_line(capsys):
    assert main(["check-env", "env=text/arithmetic"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_failed_check_exits_3_with_expected_and_actual_value(capsys):
    words = ["env.env_type=faulty_env:FACTORY", "env.kwargs.plant=nan_in_state"]
    assert main(["check-env", *words]) == 3
    printed = capsys.readouterr().out
    assert "FAIL  observe\n        observe: state[0]\n          expected  a finite number\n" in printed
    assert "1 failed" in printed
    assert main(["check-env", *words, "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == 1
    violation = {"field": "observe: state[0]", "expected": "a finite number", "found": "nan"}
    assert [c["violations"] for c in report["checks"] if c["check"] == "observe"] == [[violation]]


def test_check_env_defaults_to_tabletop(capsys):
    assert main(["check-env"]) == 0
    assert f"{len(CHECKS)} checks ok, 0 failed, 0 skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("env=tabletopp", "Did you mean 'tabletop'?"),
        ("experiment=x", "unknown key 'experiment'"),
        ("env.id=x", "env_type 'tabletop' does not read env.id"),
        ("env.env_type=nowhere:FACTORY", "Cannot import 'nowhere'"),
        ("env.control.latency_steps=2", "without inference delay"),
        ("env.train.task_ids=[0,21]", "env.train.task_ids: [21] do not exist: env 'tabletop' has tasks 0 to 20"),
    ],
)
def test_wrong_arguments_are_rejected_before_building(word, said, capsys):
    assert main(["check-env", word]) == 2
    assert said in capsys.readouterr().err


def test_training_arguments_are_accepted_with_one_warning(caplog):
    words = ["model=mlp", "launcher=inline", "algorithm=ppo", "reward.path=a:b", "runner.max_steps=1", "ckpt=runs/a"]
    cfg = load_config("check-env", ["env=tabletop", "env.train.total_num_envs=4", "env.reward_coef=2", *words])
    (line,) = (record.getMessage() for record in caplog.records)
    names = ", ".join(word.partition("=")[0] for word in words)
    assert line == f"warning: {names} have no effect: `embodyrl check-env` does not read them."
    assert cfg.env.reward_coef == 2


@pytest.mark.parametrize(
    ("command", "words", "unread"),
    [
        ("eval", ["model=mlp"], "algorithm has no effect"),
        ("collect", ["model=mlp"], "algorithm has no effect"),
        ("dagger", ["model=mlp"], "algorithm has no effect"),
        ("serve", ["model=mlp", "launcher=inline"], "algorithm, launcher have no effect"),
    ],
)
def test_unused_training_group_gives_a_warning(command, words, unread, caplog):
    load_config(command, ["env=gym", "env.id=CartPole-v1", *sorted([*words, "algorithm=ppo"])])
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "has no" in line or "have no" in line] == [
        f"warning: {unread}: `embodyrl {command}` does not read {'them' if ', ' in unread else 'algorithm'}."
    ]


@pytest.mark.sim
@pytest.mark.slow
def test_libero_passes_check_env():
    words = ["env=libero_object", "env.render_profile=lean", "env.train.task_ids=[0]"]
    size = ["env.init_params.camera_heights=128", "env.init_params.camera_widths=128"]
    assert levels(load_config("check-env", [*words, *size]).env) == {"ok"}
