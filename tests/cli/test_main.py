"""The command line in real processes: exit codes and output."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from processes import SOURCE
from run_files import write_run

from embodyrl.cli.commands import COMMANDS
from embodyrl.cli.main import main
from embodyrl.commands.run_folder import _acquire_lock
from embodyrl.config import compose

TREE = {**os.environ, "PYTHONPATH": str(SOURCE)}
"""Environment in which processes import the tree under test instead of an installed package."""


def embodyrl(*arguments: str, cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-m", "embodyrl.cli.main", *arguments], TREE | {"PYTHONPATH": f"{SOURCE}:{path}"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("env=libero_11", "Did you mean 'libero_10'?"),
        ("env.train.total_num_env=4", "Did you mean 'env.train.total_num_envs'?"),
        ("++foo=1", "foo=VALUE"),
        ("algorithm.group_size=three", "must be an integer"),
        ("algorithm.group_size=3 env.train.total_num_envs=4", "env.train.total_num_envs=3 or 6"),
    ],
)
def test_wrong_config_prints_one_line_and_exits_2(tmp_path: Path, typed: str, fix: str) -> None:
    done = embodyrl("train", *typed.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("embodyrl: error: ")
    assert fix in lines[0]
    assert list(tmp_path.iterdir()) == []


HEAVY = ("torch", "gymnasium", "mujoco", "transformers", "rich")
UNCHOSEN = ("ray", *(f"embodyrl.{name}" for name in ("envs.libero", "envs.gym", "policies.flow", "policies.causal_lm")))
MAIN = "from embodyrl.cli.main import main; "


@pytest.mark.integration
@pytest.mark.parametrize(
    ("code", "also_absent"),
    [
        ("import embodyrl.cli.main", ("hydra", "omegaconf", "yaml", "numpy", "pydantic")),
        ("from embodyrl.cli.main import main; main(['train', 'env=libero_11'])", ()),
        (f"{MAIN}main(['train', '--help'])", UNCHOSEN),
        (f"{MAIN}main(['train', 'algorithm.group_siz=2'])", UNCHOSEN),
        (f"{MAIN}main(['show', 'train', 'runner'])", UNCHOSEN),
        ("from embodyrl.cli.main import main; main(['list', 'envs'])", ("numpy", "pydantic", "hydra")),
    ],
)
def test_error_path_does_not_import_heavy_modules(tmp_path: Path, code: str, also_absent: tuple[str, ...]) -> None:
    script = f"import sys; {code}; print([m for m in {HEAVY + also_absent!r} if m in sys.modules])"
    started = [sys.executable, "-c", script]
    done = subprocess.run(started, cwd=tmp_path, env=TREE, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["env=libero_10"], "embodyrl train env=libero_10"),
        (["train", "--resum", "x"], "Did you mean '--resume'?"),
        (["train", "--dry"], "Did you mean '--dry-run'?"),
        (["train", "--json", "--dry-run"], "--json cannot be combined with --dry-run"),
        (["train", "--resume", "nowhere"], "no config.yaml"),
        (["train", "--config-dir", "nowhere"], "no such folder"),
        (["list"], "embodyrl list needs a kind"),
        (["list", "env"], "Did you mean 'envs'?"),
        (["list", "envs", "seed=1"], "no more arguments"),
        (["show", "algoritm"], "Did you mean 'algorithm'?"),
        (["show", "env=libero_11"], "Did you mean 'libero_10'?"),
        (["doctor", "--jsn"], "Did you mean '--json'?"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_usage_error_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], fragment: str) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert fragment in captured.err


def test_each_problem_is_printed_on_its_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "sed=1", "algorithm.gamma=2", "env=libero_11"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("embodyrl: error: ") for line in lines)


def test_traceback_is_printed_only_if_requested(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "sed=1"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert main(["train", "sed=1", "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_flags_and_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: embodyrl {command}")
    for flag in COMMANDS[command].flags:
        assert flag in text
    for example in COMMANDS[command].examples:
        assert example in text


def test_train_help_lists_every_option_and_common_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for group in compose.default_options("train"):
        for option in compose.options(group):
            assert option in text or option.startswith(("libero_pro_", "libero_plus_"))
    assert "libero_pro_*" in text
    assert "*openvla_oft_tiny" in text
    assert "algorithm.group_size=8" in text
    assert "Number of episodes per group; all episodes of a group share a reset id." in " ".join(text.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_on_two_screens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 100
    assert [line for line in lines if len(line) > 100 and not line.startswith(("usage: ", "  embodyrl "))] == []


@pytest.mark.parametrize("command", ["train", "eval"])
def test_help_shows_the_defaults_of_the_command(capsys: pytest.CaptureFixture[str], command: str) -> None:
    from embodyrl.config.settings import format_value
    from embodyrl.plan.config import load_config

    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for key, value in load_config(command, [], fetch=False).leaves():
        if found := re.search(rf"^  {re.escape(key)}=(\S+) ", text, re.MULTILINE):
            assert found[1] == format_value(value), key


def test_list_shows_each_environment_family_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "envs"]) == 0
    text = capsys.readouterr().out
    assert "libero_pro_*" in text
    assert "LIBERO-PRO: 16 options; embodyrl list envs libero_pro" in text
    assert "libero_pro_10_swap" not in text
    assert main(["list", "envs", "libero_pro"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 16
    assert main(["list", "envs", "no_such"]) == 2


def test_overview_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    first = re.findall(r"^  (\S+) ", text[text.index("commands:") : text.index("more:")], re.MULTILINE)
    assert first == ["train", "eval", "collect", "sft", "play", "report", "list", "show", "doctor", "new"]


def test_every_example_in_the_help_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    from embodyrl.cli.sweep import expand
    from embodyrl.plan.config import load_config

    for name in ("train", "eval"):
        for example in COMMANDS[name].examples:
            typed = example.split()[2:]
            words = [w for w in typed if "=" in w]
            for job in expand(words) if "-m" in typed else [words]:
                load_config(name, job, fetch=False)


def remove_random_init_key(folder: Path) -> Path:
    from embodyrl.plan.config import load_config
    from embodyrl.plan.saved import save_config

    folder.mkdir(parents=True)
    save_config(load_config("train", ["seed=4", "runner.experiment_name=kitchen"]), folder / "config.yaml")
    return folder


def test_list_runs_shows_step_and_success_of_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = remove_random_init_key(tmp_path / "a"), remove_random_init_key(tmp_path / "b")
    os.utime(old / "config.yaml", (1, 1))
    (new / "metrics.jsonl").write_text('{"step": 1, "eval/success_once": 0.25}\n{"step": 2}\n{"step": 3, "tra')
    assert main(["list", "runs", f"runner.output_dir={tmp_path}", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [(r["id"], r["step"], r["success"]) for r in runs] == [("b", 2, 0.25), ("a", None, None)]
    table = old / "eval" / "step_000004" / "eval.json"
    for text, found in [('{"overall": {"success_once": 0.5, "mean_return": 2}}', (4, 0.5)), ("{", (None, None))]:
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(text)
        assert main(["list", "runs", f"runner.output_dir={tmp_path}", "--json"]) == 0
        _, evaluated = json.loads(capsys.readouterr().out)
        assert (evaluated["step"], evaluated["success"]) == found


def test_list_runs_reads_only_the_output_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "runs", f"runner.output_dir={tmp_path}"]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}/\n"
    assert main(["list", "runs", "env=gym"]) == 2
    assert "remove 'env'" in capsys.readouterr().err


@pytest.mark.integration
def test_killed_run_is_not_listed_as_running(tmp_path: Path) -> None:
    from embodyrl.reports.history import is_running

    run = remove_random_init_key(tmp_path / "a")
    assert not is_running(run)
    os.close(_acquire_lock(run / "lock", run))
    assert is_running(run), "the lock names this process"
    with subprocess.Popen(["sleep", "600"]) as other:
        (run / "lock").write_text(f"process {other.pid} on {socket.gethostname()}")
        assert is_running(run)
        other.kill()
        other.wait()
        assert not is_running(run)
        (run / "lock").write_text(f"process {other.pid} on another-host")
        assert is_running(run), "what lives there cannot be seen from here"


def test_list_describes_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "envs", "--json"]) == 0
    rows = {r["name"]: r["about"] for r in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(compose.options("env"))
    assert "basket" in rows["libero_object"]


def test_show_prints_value_default_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "env=libero_goal", "env.reward_coef=2", "--json"]) == 0
    rows = {r["key"]: r for r in json.loads(capsys.readouterr().out)}
    assert all(key.startswith("env.") for key in rows)
    steps = rows["env.train.max_episode_steps"]
    assert (steps["value"], steps["default"], steps["source"]) == (320, 512, "conf/env/libero_goal")
    assert rows["env.reward_coef"]["source"] == "command line"
    assert rows["env.train.auto_reset"]["source"] == "default"
    assert main(["show", "algorithm.group_size"]) == 0
    assert capsys.readouterr().out.startswith("algorithm.group_size: int = 8  [default]\n")


def test_schema_contains_every_key_of_the_chosen_components(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "eval", "env=gym", "model=mlp", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    found = {name: entry for part in schema["$defs"].values() for name, entry in part.get("properties", {}).items()}
    assert found["hidden_sizes"]["description"].startswith("Widths")
    assert found["episodes"]["description"] == "Total number of evaluation episodes; overrides episodes_per_task."
    assert "wrappers" in found
    assert "unnorm_key" not in found
    assert schema["additionalProperties"] is False


def test_print_config_round_trips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from embodyrl.plan.config import load_config, load_saved_config

    typed = ["experiment=libero_laptop", "env.train.task_ids=[1]", "seed=8"]
    assert main(["train", *typed, "--print-config"]) == 0
    out = capsys.readouterr().out
    (tmp_path / "config.yaml").write_text(out)
    assert load_saved_config(tmp_path, []) == load_config("train", typed)
    assert main(["train", *typed, "--print-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == yaml.safe_load(out)


def test_resume_uses_the_config_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = remove_random_init_key(tmp_path / "run")
    for arguments in (["--resume", str(run)], [f"runner.resume_dir={run}"], [f"runner.resume_dir='{run}'"]):
        assert main(["train", *arguments, "runner.max_steps=11", "--print-config"]) == 0
        cfg = yaml.safe_load(capsys.readouterr().out)
        assert (cfg["seed"], cfg["runner"]["max_steps"]) == (4, 11)
    assert main(["train", "--resume", str(run), "env=libero_10"]) == 2
    assert "no group options" in capsys.readouterr().err
    assert main(["train", "--resume", str(run), "ckpt=x"]) == 2
    assert "remove one of the two" in capsys.readouterr().err
    assert main(["train", "--resume", str(run), "runner.only_eval=true"]) == 2
    assert f"embodyrl eval ckpt={run}" in capsys.readouterr().err


def test_eval_resume_of_a_training_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = remove_random_init_key(tmp_path / "run")
    (run / "checkpoints").mkdir()
    assert main(["eval", "--resume", str(run)]) == 2
    assert f"embodyrl eval ckpt={run}" in capsys.readouterr().err


def test_newest_run_of_an_experiment_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from embodyrl.cli.runs import find_experiment_run

    old, new, evaluation = (remove_random_init_key(tmp_path / name) for name in "abc")
    for age, folder in enumerate((evaluation, new, old)):
        os.utime(folder / "config.yaml", (100 - age, 100 - age))
    assert find_experiment_run(tmp_path, "kitchen") is None
    for folder in (old, new):
        (folder / "checkpoints").mkdir()
    assert find_experiment_run(tmp_path, "kitchen") == new
    assert find_experiment_run(tmp_path, "garage") is None
    assert find_experiment_run(tmp_path / "nowhere", "kitchen") is None
    assert main(["train", "--resume", "auto"]) == 2
    assert "runner.experiment_name=NAME" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        ("KeyboardInterrupt()", 130, "embodyrl: interrupted."),
        ("errors.Interrupted(15)", 143, "embodyrl: stopped by SIGTERM."),
        ("errors.NonFiniteError('loss is nan')", 5, "embodyrl: error: loss is nan"),
        ("errors.EmbodyError('first')", 1, "embodyrl: error: first"),
        ("errors.EmbodyError('first\\n  File x')", 1, "embodyrl: error: first\n  File x"),
        ("errors.ConfigError(['a', 'b'])", 2, "embodyrl: error: a\nembodyrl: error: b"),
        (
            "PermissionError(13, 'Permission denied', '/a')",
            1,
            "embodyrl: error: /a: Permission denied. Change the permissions, or choose another folder; --traceback",
        ),
        ("OSError(24, 'Too many open files')", 1, "embodyrl: error: a file or socket: Too many open files. Raise the"),
        ("MemoryError()", 1, "embodyrl: error: not enough memory. Use fewer parallel environments"),
        ("RuntimeError('bug')", 1, "embodyrl: error: unexpected RuntimeError: bug. Report the output with --traceback"),
        ("SystemExit(0)", 1, "embodyrl: error: unexpected SystemExit: 0. Report the output with --traceback"),
        ("SystemExit", 1, "embodyrl: error: unexpected SystemExit. Report the output with --traceback"),
    ],
)
def test_each_error_class_has_its_exit_code_and_no_traceback(tmp_path: Path, raised: str, code: int, said: str) -> None:
    (tmp_path / "broken_env.py").write_text(
        f"from embodyrl import errors\ndef __getattr__(name):\n    raise {raised}\n"
    )
    done = embodyrl("train", "env.env_type=broken_env:FACTORY", cwd=tmp_path, path=str(tmp_path))
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(said)
    assert "Traceback" not in done.stderr


@pytest.mark.integration
@pytest.mark.parametrize(
    ("saved", "said"), [("", "stopped by a second signal, SIGINT; saved files are complete"), ("; resume with: x", "")]
)
def test_second_signal_prints_the_resume_command_if_it_is_known(saved, said, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "stopped_env.py").write_text(
        "from embodyrl.errors import Interrupted, StoppedImmediately\n"
        "def __getattr__(name):\n    first = Interrupted(15)\n    first.args = (f'{first}' + SAVED,)\n"
        "    try:\n        raise first\n    except Interrupted:\n        raise StoppedImmediately(2)\n"
        f"SAVED = {saved!r}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "stopped_env", raising=False)
    assert main(["train", "env.env_type=stopped_env:FACTORY"]) == 130
    assert capsys.readouterr().err == f"embodyrl: {said or 'stopped by SIGTERM; resume with: x'}.\n"


def test_closed_output_pipe_is_not_reported(tmp_path: Path) -> None:
    command = f"{sys.executable} -m embodyrl.cli.main show train | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=TREE, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


def test_commands_without_a_run_use_the_newest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["report"], ["view"], ["train", "--resume"], ["train", "--resume", "runner.max_steps=3"]):
        assert main(words) == 2
        assert "contains no matching run" in capsys.readouterr().err
    write_run(tmp_path / "runs" / "new")
    assert main(["view"]) == 0
    assert "new" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "runs" / "new" / "eval")
    (tmp_path / "runs" / "new" / "metrics.jsonl").unlink()
    assert main(["view"]) == 0
    assert "no metrics yet" in capsys.readouterr().out


@pytest.mark.integration
def test_leftover_env_threads_are_reported_and_do_not_block_exit(tmp_path):
    """The command also works as a module."""
    words = ("env=gym", "env.id=foreign_envs:OnlyThreads-v0", "model=mlp", "--dry-run")
    done = subprocess.run(
        [sys.executable, "-m", "embodyrl", "train", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "thread motor did not end" in done.stdout
    assert "9 steps per episode (the environment's own limit)" in done.stdout


@pytest.mark.parametrize("command", ["train", "eval", "collect"])
def test_missing_checkpoint_is_reported_before_other_errors(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "nonsuch").mkdir(parents=True)
    assert main([command, "env=gym", "env.id=CartPole-v1", "ckpt=runs/nonesuch"]) == 6
    assert "no such run, checkpoint or model folder. Did you mean 'runs/nonsuch'" in capsys.readouterr().err


@pytest.mark.integration
def test_installed_package_adds_a_command(tmp_path: Path) -> None:
    (tmp_path / "greeting_of_mine.py").write_text(
        "def greet(args):\n    print('hello', *args.arguments)\n    return 3\n"
    )
    info = tmp_path / "greeting_of_mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting-of-mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[embodyrl.commands]\ngreet = greeting_of_mine:greet\n")
    paths = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"}
    command = [sys.executable, "-m", "embodyrl.cli.main"]
    run = subprocess.run([*command, "greet", "a", "--b"], capture_output=True, text=True, env=os.environ | paths)
    assert (run.returncode, run.stdout) == (3, "hello a --b\n"), run.stderr
    run = subprocess.run([*command, "--help"], capture_output=True, text=True, env=os.environ | paths)
    assert re.search(r"greet +Command of the package greeting-of-mine\.", run.stdout)


def test_list_names_extras_and_how_to_install_them(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    from embodyrl.cli.discover import command

    monkeypatch.setattr(command, "find_spec", lambda module: None)
    assert main(["list", "extras"]) == 0
    text = capsys.readouterr().out
    assert "libero, meshoptimizer, mujoco, robosuite is not installed: pip install 'embodyrl[libero]'" in text
    assert main(["list", "envs"]) == 0
    assert "metaworld is not installed: pip install 'embodyrl[metaworld]'" in capsys.readouterr().out
    monkeypatch.setattr(command, "find_spec", lambda module: "spec")
    assert main(["list", "extras", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"gguf", "vllm"} <= {*rows}
    assert rows["ray"] == {"name": "ray", "about": "installed: ray", "missing": ""}
