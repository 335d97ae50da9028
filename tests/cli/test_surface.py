"""The public interface: targets of commands, start-up imports, and the use of every config key."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import SETS_PATH, SOURCE, command_environment, run_cli
from run_files import write_run
from toy_runs import toy_config, toy_words

import embodyrl
from embodyrl.cli.commands import COMMANDS
from embodyrl.cli.main import main
from embodyrl.config import compose
from embodyrl.config.compose import format_override
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config
from embodyrl.plan.keys import all_keys
from embodyrl.plan.saved import save_config


def test_every_command_target_is_callable() -> None:
    from importlib import import_module

    for name, command in COMMANDS.items():
        module, _, function = command.target.partition(":")
        assert callable(getattr(import_module(module), function)), name


def read_names() -> set[str]:
    """Return attribute names and strings that the package uses outside config/."""
    names: set[str] = set()
    for path in (SOURCE / "embodyrl").rglob("*.py"):
        if "config" in path.relative_to(SOURCE / "embodyrl").parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"\w+", node.value):
                names.add(node.value)
    return names


def test_every_config_key_is_read_by_code() -> None:
    read = read_names()
    assert "group_size" in read
    assert "total_num_envz" not in read
    whole = "rollout.vllm."  # handed to the engine as they are, by VllmSettings.arguments
    unread = [name for name in all_keys() if name.split(".")[-1] not in read and not name.startswith(whole)]
    assert unread == []


@pytest.mark.integration
@pytest.mark.parametrize("group", compose.default_options("train"))
def test_every_option_of_every_group_composes(group: str) -> None:
    for option in compose.options(group):
        if option == "ray" and find_spec("ray") is None:
            continue  # rejected, with what to install
        places = load_config(
            "train", [f"{group}={option}"]
        ).sources.values()  # rejects options that do not fit together
        assert any(place.removesuffix(".yaml").endswith(f"{group}/{option}") for place in places)


def test_sweep_runs_each_combination_in_its_own_folder() -> None:
    from embodyrl.cli.sweep import expand

    words = ["seed=range(0,2)", "env=tabletop,libero_10", "runner.experiment_name=a", "env.train.task_ids=[0,1]"]
    jobs = expand(words)
    assert [job[:3] for job in jobs] == [
        ["seed=0", "env=tabletop", "runner.experiment_name=a-0"],
        ["seed=0", "env=libero_10", "runner.experiment_name=a-1"],
        ["seed=1", "env=tabletop", "runner.experiment_name=a-2"],
        ["seed=1", "env=libero_10", "runner.experiment_name=a-3"],
    ]
    assert all(job[3] == "env.train.task_ids=[0,1]" for job in jobs)
    for words in (["seed=,,("], ["actor.optim.lr=interval(0,1)"], ["seed=range(0,1,0)"], ["seed=range(3,1)"]):
        with pytest.raises(ConfigError, match="Cannot sweep"):
            expand(words)


def test_sweep_with_one_invalid_combination_starts_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-m", "seed=0,-1"]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "seed=-1: must be" in captured.err
    words = ["env=tabletop", "model=openvla_oft_tiny,mlp"]  # each is fine by itself
    assert main(["train", "-m", *words, f"runner.output_dir={tmp_path}/none"]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "model 'mlp' reads no image" in captured.err
    assert not (tmp_path / "none").exists()


def test_sweep_from_a_run_uses_the_components_of_that_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    save_config(load_config("train", ["experiment=cartpole"]), tmp_path / "config.yaml")
    assert main(["train", "-m", f"ckpt={tmp_path}", "algorithm=ppo", "model.hidden_sizes=[8]", "seed=0,-1"]) == 2
    said = capfd.readouterr().err
    assert "seed=-1: must be" in said
    assert "hidden_sizes" not in said


def test_help_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["--help"], ["train", "--help"]):
        assert main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if len(line) > 80 and not line.startswith("  embodyrl ")] == [], "but examples"


@pytest.mark.integration
def test_sweep_ends_with_a_table_and_a_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tests.parent}:{tests}")
    words = toy_words(tmp_path, "runner.max_steps=1", "launcher=inline", "video=none")
    (tmp_path / "own").mkdir()
    flags = ["--config-dir", str(tmp_path / "own")]
    assert main(["train", "-m", *words, "seed=3", *flags]) == 0
    first, *_, heading, row, last = capfd.readouterr().out.splitlines()
    assert first.startswith(f"[1/1] PYTHONPATH={tests.parent}:{tests} embodyrl train ")
    assert first.endswith(f" seed=3 {' '.join(flags)}")
    assert (tmp_path / "run" / "overrides.txt").read_text().endswith(f" seed=3 {' '.join(flags)}\n")
    assert heading.split() == ["run", "settings", "step", "success", "return"]
    assert row.split()[:2] == ["run", "1"]
    assert last == f"next  embodyrl report {tmp_path / 'run'} --open"


@pytest.mark.integration
def test_suggested_commands_quote_unusual_paths(tmp_path: Path) -> None:
    """The commands are parsed by real shells; `ckpt=` of a run needs the settings of that run."""
    folder = tmp_path / 'it\'s $HOME (1), a=b; [c] \\ "d"'
    words = toy_words(Path("X"), "runner.max_steps=1", "launcher=inline", "video=none")
    words = [
        format_override("runner.output_dir", str(folder)) if w.startswith("runner.output_dir=") else w for w in words
    ]
    done = run_cli("train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = [line[13:] for line in done.stdout.splitlines() if line[13:].startswith(f"{SETS_PATH}embodyrl ")]
    assert [line.split()[2] for line in told] == ["report", "eval", "play"]
    script = f'embodyrl() {{ "{sys.executable}" -m embodyrl.cli.main "$@"; }}\n'
    script += f"{told[0].removesuffix(' --open')}\n{told[1]} --print-config\n"
    found = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, env=command_environment(tmp_path), capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert f"page  {folder}/run/report.html" in found.stdout
    assert "env_type: toy_env:FACTORY" in found.stdout
    again = run_cli("eval", "--resume", str(folder / "run"), cwd=tmp_path)
    line = again.stderr.partition("Resume it: ")[2].partition(". Evaluate")[0]
    assert shlex.split(line) == ["embodyrl", "train", "--resume", str(folder / "run")]


@pytest.mark.integration
def test_python_api_validates_like_the_commands() -> None:
    cfg = embodyrl.compose("train", "env=tabletop", "runner.max_steps=2")
    assert cfg.runner.max_steps == 2
    with pytest.raises(ConfigError, match=r"actor.optim.lr=-1.0 must be a number at least 0"):
        embodyrl.train(cfg.updated({"actor.optim.lr": -1.0}))
    with pytest.raises(ConfigError, match=r"call embodyrl\.evaluate"):
        embodyrl.train(embodyrl.compose("train", "runner.only_eval=true"))
    with pytest.raises(ConfigError, match="does not read"):
        embodyrl.evaluate(embodyrl.compose("eval", "env.id=x"))
    for command in ("eval", "collect"):
        with pytest.raises(ConfigError, match=f"composed for `{command}`, not for `train`"):
            embodyrl.train(embodyrl.compose(command, "env=tabletop"))
    with pytest.raises(ConfigError, match="composed for `eval`, not for `sft`"):
        embodyrl.sft(embodyrl.compose("eval", "env=tabletop"))
    with pytest.raises(ConfigError, match="composed for `eval`, not for `collect`"):
        embodyrl.collect(embodyrl.compose("eval", "env=tabletop"))
    code = "import sys, embodyrl; print('torch' in sys.modules or 'hydra' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("kind", [str, Path])
def test_python_api_resumes_existing_runs_only(kind: type, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"typo is not a run: it has no config\.yaml"):
        embodyrl.train(toy_config(tmp_path), resume=kind(f"{tmp_path}/typo"))
    assert not any(tmp_path.iterdir())
    run = embodyrl.train(toy_config(tmp_path, "runner.max_steps=1")).run
    assert embodyrl.train(toy_config(tmp_path, "runner.max_steps=2"), resume=kind(run)).step == 2


def test_view_shows_training_and_evaluation_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "runs" / "a")
    assert main(["view", str(run)]) == 0
    assert "Time per phase" in capsys.readouterr().out
    (run / "metrics.jsonl").unlink()
    assert main(["view", str(run)]) == 0
    assert "all tasks" in capsys.readouterr().out


@pytest.mark.integration
def test_bash_completion_covers_commands_options_and_keys(tmp_path: Path) -> None:
    def complete(*words: str) -> set[str]:
        listed = " ".join(f"'{w}'" for w in words)
        script = f'eval "$({sys.executable} -m embodyrl.cli.main completion bash)"; COMP_WORDS=({listed}); '
        script += f'COMP_CWORD={len(words) - 1}; _embodyrl 2>/dev/null; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
        return set(done.stdout.split())

    assert complete("embodyrl", "tr") == {"train"}
    assert "env=tabletop" in complete("embodyrl", "train", "env=t")
    assert "--dry-run" in complete("embodyrl", "train", "--")
    assert complete("embodyrl", "train", "actor.optim.warmup_s") == {"actor.optim.warmup_steps="}


def test_json_flag_prints_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["list", "evals"], ["list", "algorithms"], ["show", "eval"], ["train", "--print-config"]):
        assert main([*words, "--json"]) == 0
        json.loads(capsys.readouterr().out)


def test_run_path_is_accepted_with_or_without_ckpt_key(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    told = []
    for word in ("ckpt=runs/mine", "runs/mine"):
        assert main(["eval", word, "--print-config"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert "ckpt: runs/mine" in told[1]
