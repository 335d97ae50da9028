"""Run folders from untrusted sources never run code and never contact a server."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from run_files import write_run
from settings import model_of
from toy_runs import train_toy

from embodyrl import files
from embodyrl.cli.main import main
from embodyrl.commands.evaluate import evaluate
from embodyrl.commands.run_folder import resolve_initial_weights
from embodyrl.commands.train import train
from embodyrl.errors import CheckpointError, ConfigError, UnknownNameError, hide_value, mask_json
from embodyrl.monitor.history import read_newest_values
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.plan.saved import save_config
from embodyrl.reports.history import read_history

PAYLOAD = "open(__file__ + '.ran', 'w').close()\nPART = print\n"

DOORS = {
    "env.env_type": "payload:PART",
    "model.model_type": "payload:PART",
    "algorithm.adv_type": "payload:PART",
    "algorithm.loss_type": "payload:PART",
    "model.python": "./theirs/python",
    "env.python": "./theirs/python",
    "launcher.name": "payload:PART",
    "runner.logger.backends": ["console", "payload:PART"],
    "env.id": "payload:Thing-v0",
    "env.wrappers": ["payload:PART"],
    "env.tools": ["payload:PART"],
    "data.path": "payload:PART",
    "data.val_path": "payload:PART",
    "reward.name": "payload:PART",
    "reward.path": "http://127.0.0.1:9/judge",
    "reward.weights": {"payload:PART": 1.0},
    "reward.weights.payload:PART": 1.0,
    "env.kwargs": {"part": "payload:PART"},
}


def foreign_run(folder: Path, key: str, value: object) -> Path:
    """Create a run whose config names code at `key`, through an interpolation if `key` is env.kwargs."""
    folder.mkdir()
    (folder / "checkpoints").mkdir()
    env = "env=text/reverse" if key.startswith(("data", "reward", "env.tools")) else "env=tabletop"
    env = "env=gym" if key in ("env.id", "env.wrappers", "env.kwargs") else env
    env = "env=robosuite_lift" if key == "env.python" else env
    model = {"env=robosuite_lift": "mlp", "env=text/reverse": "causal_lm_tiny", "env=gym": "mlp"}.get(
        env, "openvla_oft_tiny"
    )
    save_config(load_config("train", [env, f"model={model}"]), folder / "config.yaml")
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    *path, last = key.split(".", 2)
    node = saved
    for part in path:
        node = node[part]
    node[last] = value
    if key == "env.kwargs":
        saved["env"]["env_type"] = "${env.kwargs.part}"
    saved["trust"] = True  # counts only where it is typed
    (folder / "config.yaml").write_text(yaml.safe_dump(saved))
    return folder


@pytest.mark.parametrize("key", DOORS)
def test_commands_do_not_run_code_named_in_a_saved_config(key, tmp_path, monkeypatch, capsys):
    (tmp_path / "payload.py").write_text(PAYLOAD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = foreign_run(tmp_path / "theirs", key, DOORS[key])
    commands = [["train", "--dry-run", "--resume", str(run)], ["train", "--resume", str(run)]]
    if not key.startswith(("launcher", "runner")):  # `ckpt` takes the model from the run, or all three
        command = "train" if key.startswith("model") else "eval"
        commands.append([command, f"ckpt={run}", "--dry-run"])
    for command in commands:
        assert main(command) == 2, command
        said = capsys.readouterr().err
        assert "add trust=true" in said
        assert str(run) in said
    assert not list(tmp_path.glob("*.ran"))


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("env.id", "gym payload:Thing-v0", "add trust=true"),
        ("env.id", "gympayload/Thing-v0", "add trust=true"),
        ("env.env_type", "gympayload${oc.env:DISPLAY}", "add trust=true"),
        ("eval.protocol.settings", ["env.env_type=gympayload:PART"], "add trust=true"),
        ("eval.protocol.settings", ["env.env_type=gympayload${oc.env:DISPLAY}"], "add trust=true"),
        ("eval.protocol.settings", ["trust=true", "env.env_type=gympayload:PART"], "add trust=true"),
        ("eval.protocol.settings", ["trust=true"], "a protocol sets only"),
    ],
)
def test_evaluations_do_not_run_code_named_indirectly(key, value, problem, tmp_path, monkeypatch, capsys):
    for name in ("gym payload", "gympayload"):
        (tmp_path / f"{name}.py").write_text(PAYLOAD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISPLAY", ":0")
    run = foreign_run(tmp_path / "theirs", key, value)
    assert main(["eval", f"ckpt={run}", "--dry-run"]) == 2
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.glob("*.ran"))


def test_resumed_evaluation_rejects_untrusted_code(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = foreign_run(tmp_path / "theirs", "env.env_type", "subprocess:Popen")
    shutil.rmtree(run / "checkpoints")
    assert main(["eval", "--resume", str(run)]) != 0
    assert "Traceback" not in capsys.readouterr().err


def test_code_paths_on_the_command_line_are_trusted(tmp_path):
    run = foreign_run(tmp_path / "mine", "env.env_type", "toy_env:FACTORY")
    assert load_saved_config(run, ["trust=true"]).env.env_type == "toy_env:FACTORY"
    assert load_saved_config(run, ["env.env_type=toy_env:FACTORY"]).env.env_type == "toy_env:FACTORY"
    with pytest.raises(ConfigError, match="add trust=true"):
        load_saved_config(run, ["trust=false"])


def test_suggested_next_commands_work(tmp_path):
    told = (train_toy(tmp_path) / "logs" / "events.log").read_text()
    for command in ("embodyrl eval ckpt=", "embodyrl play "):
        (line,) = [line for line in told.splitlines() if command in line]
        assert line.endswith(f"{command}{tmp_path / 'run'} trust=true")


OTHER_ENV = ("env.id=Acrobot-v1", r"state_dim is 4 \(this run needs 6")


def test_mismatched_weights_do_not_start_an_evaluation(tmp_path):
    words = ("env=gym", "env.id=CartPole-v1", "model=mlp", "launcher=inline", f"runner.output_dir={tmp_path}")
    short = (
        "algorithm=ppo",
        "env.train.max_steps_per_rollout_epoch=8",
        "runner.max_steps=1",
        "runner.val_check_interval=-1",
    )
    run = train(load_config("train", [*words, *short])).run
    saved = (run / "config.yaml").read_text()
    for wrong, said in (("model.hidden_sizes=[8]", r"hidden is \[64, 64\] \(this run needs \[8\]"), OTHER_ENV):
        typed = [*words, f"ckpt={run}", *wrong.split()]
        with pytest.raises(ConfigError, match=rf"ckpt={run}.*{said}.*use the run's settings"):
            evaluate(load_config("eval", typed))
    assert [path.name for path in tmp_path.iterdir()] == [run.name], "refused before a folder or a worker began"
    with pytest.raises(ConfigError, match=r"--resume .*hidden is \[64, 64\]"):
        train(load_saved_config(run, ["model.hidden_sizes=[8]", "runner.max_steps=2"]), resume=run)
    assert (run / "config.yaml").read_text() == saved, "a run that cannot go on so must still go on as it was"


def test_policy_trained_with_proprioception_requires_proprioception(tmp_path):
    shipped = Path(__file__).parents[2] / "assets" / "openvla_oft_tabletop"
    words = ("env=tabletop", "model=openvla_oft_tiny", f"ckpt={shipped}", f"runner.output_dir={tmp_path}")
    cfg = load_config("eval", [*words, "model.use_proprio=true"])
    env = build_run_plan(cfg, training=False).env
    assert resolve_initial_weights(cfg, env) == shipped
    with pytest.raises(ConfigError, match=r"trained with proprioception .* model\.use_proprio=true"):
        resolve_initial_weights(load_config("eval", [*words, "model.use_proprio=false"]), env)


def test_registered_components_need_no_trust(tmp_path):
    for key, value in [("env.env_type", "tabletop"), ("data.path", "embodyrl.text.tasks:copy")]:
        load_saved_config(foreign_run(tmp_path / key, key, value), ["trust=false"])


@pytest.mark.parametrize(
    "words",
    [
        ["env.env_type=os:system"],
        ["env.env_type=subprocess:Popen"],
        ["algorithm.loss_type=os:getcwd"],
        ["algorithm.adv_type=os:getcwd"],
        ["model.model_type=os:getcwd"],
        ["launcher.name=os:getcwd"],
        ["runner.logger.backends=[console,os:getcwd]"],
        ["env=gym", "model=mlp", "env.id=subprocess:Popen", "env.kwargs.args=[touch,called]"],
        ["env=gym", "model=mlp", "env.id=os:mkdir", "env.kwargs.path=called"],
        ["env=gym", "model=mlp", "env.id=CartPole-v1", "env.wrappers=[os:getcwd]"],
        ["env=text/reverse", "model=causal_lm_tiny", "reward.path=os:mkdir"],
        ["env=text/reverse", "model=causal_lm_tiny", "data.path=os:mkdir", "data.kwargs.path=called"],
        ["env=text/calculator", "model=causal_lm_tiny", "env.tools=[os:mkdir]"],
    ],
    ids=lambda words: words[-1] if words[0][:4] != "env=" else words[2],
)
def test_objects_of_the_wrong_type_are_rejected_without_being_called(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert ", not a" in said, said
    assert not list(tmp_path.iterdir())


def test_class_in_place_of_a_factory_is_rejected():
    from embodyrl.envs import ENVS

    with pytest.raises(UnknownNameError, match=r"is type .*TextFactory.*, not a factory"):
        ENVS.get("embodyrl.envs.text.factory:TextFactory")


SECRET = 'hf_it\'s: "secret"'


def test_environment_variables_are_hidden_in_output(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MY_TOKEN", SECRET)
    words = ["env=gym", "env.id=CartPole-v1", "model=mlp", "env.kwargs.token=${oc.env:MY_TOKEN}"]
    assert main(["train", *words, "runner.logger.project_name=a/${oc.env:MY_TOKEN}"]) == 2
    assert main(["train", *words, "--print-config"]) == 0
    captured = capsys.readouterr()
    assert "secret" not in captured.out + captured.err
    cfg = load_config("train", words)
    assert cfg.env.kwargs == {"token": SECRET}
    save_config(cfg, tmp_path / "config.yaml")
    assert "token: ${oc.env:MY_TOKEN}\n" in (tmp_path / "config.yaml").read_text()
    assert load_saved_config(tmp_path, []) == cfg


PEM = "-----BEGIN KEY-----\nMIIEvQ secret\tline 1\nsecret line 2\n---"


@pytest.mark.parametrize("value", [PEM, SECRET, "secret" * 60, f"x{SECRET}"])
def test_environment_variables_are_hidden_in_errors_and_json(value, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SHORTER", SECRET)
    monkeypatch.setenv("MY_TOKEN", value)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    words = ["env=text/copy", "model=causal_lm_tiny"]
    save_config(load_config("train", words), tmp_path / "run" / "config.yaml")
    for key in ("env.env_type", "model.path", "reward.name", "runner.logger.backends"):
        assert main(["train", *words, f"{key}=${{oc.env:MY_TOKEN}}", "seed=${oc.env:SHORTER}"]) == 2
        assert main(["train", *words, f"{key}=${{oc.env:MY_TOKEN}}", "--dry-run"]) == 2
    for flag in ((), ("--json",)):
        assert main(["doctor", str(tmp_path / "run"), "model.path=${oc.env:MY_TOKEN}", *flag]) == 3
    captured = capsys.readouterr()
    assert "${oc.env:MY_TOKEN}" in captured.err + captured.out
    assert "secret" not in captured.err + captured.out


def test_masked_json_is_valid():
    hide_value("NUMBER", "918273645")
    text = mask_json(json.dumps({"seed": 918273645, "a\\": 'say "918273645"\\'}))
    assert json.loads(text) == {"seed": 918273645, "a\\": 'say "${oc.env:NUMBER}"\\'}


def test_a_config_that_grows_without_bound_is_rejected(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text("seed: &a [1, 1]\nvideo: [*a, *a]\n")
    for command in (["train", "--resume"], ["report"], ["view"]):
        assert main([*command, str(tmp_path)]) == 2
        assert "config.yaml:2: YAML aliases are refused" in capsys.readouterr().err


def test_large_configs_give_short_errors(tmp_path):
    """The search for similar keys and the formatting of long lists take minutes without limits."""
    run = foreign_run(tmp_path / "theirs", "env.env_type", "tabletop")
    saved = yaml.safe_load((run / "config.yaml").read_text())

    def errors(*arguments: str, **more: object) -> list[str]:
        (run / "config.yaml").write_text(yaml.safe_dump(saved | more))
        with pytest.raises(ConfigError) as caught:
            load_saved_config(run, arguments)
        return str(caught.value).splitlines()

    assert len(errors(more={f"k{i}": 1 for i in range(1000)})) == 20
    (line,) = errors(more=["a:b"] * 3000)
    assert f"{run / 'config.yaml'}: more: a:b runs code" in line
    assert line.endswith("add more=....")
    assert len(errors(more={f"k{i}": "a:b" for i in range(1000)})) == 20
    assert len(errors("trust=true", more=["a:b"] * 3000)) == 1
    assert "keys; a config has at most 5000" in errors(more={f"k{i}": 1 for i in range(5000)})[0]
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    assert load_saved_config(run, ["seed=3"]).env.env_type == "tabletop"


def test_endless_files_are_not_loaded_into_memory(tmp_path):
    """The files are sparse, so their size costs no disk space."""
    from embodyrl.reports.history import read_history

    run = write_run(tmp_path / "theirs")
    with open(run / "metrics.jsonl", "r+b") as file:
        file.truncate(1 << 28)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"step": 4}\n')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert [row["step"] for row in read_history(run).rows] == [0, 1, 2, 3, 4]
    assert read_newest_values(run / "metrics.jsonl", ("step",)) == [4]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 << 10
    os.truncate(run / "config.yaml", 1 << 40)
    with pytest.raises(ConfigError, match="a config has at most"):
        read_history(run)


def test_report_embeds_only_real_video_files(tmp_path):
    from embodyrl.reports.history import read_history

    run = foreign_run(tmp_path / "theirs", "env.env_type", "tabletop")
    (tmp_path / "secret.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    videos = tmp_path / "videos" / "theirs"
    videos.mkdir(parents=True)
    (videos / "good.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    (videos / "text.mp4").write_text("no video")
    (videos / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    history = read_history(run)
    for stored in ("/etc/hostname", str(tmp_path / "secret.mp4"), "text.mp4", "link.mp4", "../../secret.mp4"):
        assert history.find_video(stored) is None, stored
    assert history.find_video("elsewhere/good.mp4") == videos / "good.mp4"


def test_report_follows_no_links_and_runs_no_script(tmp_path, monkeypatch, capsys):
    bang = "<script>alert(1)</script>\x1b]0;owned\x07"
    run = write_run(tmp_path / "runs" / "theirs")
    secret = tmp_path / "secret.log"
    secret.write_text("2026-01-01 error: hunter2\nTraceback (most recent call last):\ncommit hunter2\n")
    for name in ("logs/events.log", "logs/attempt_1/env_0.log", "env.txt"):
        (run / name).unlink()
        (run / name).symlink_to(secret)
    for file in run.glob("eval/*/episodes.jsonl"):
        rows = [json.loads(line) | {"task": bang, "suite": bang} for line in file.read_text().splitlines()]
        rows[0]["conversation"] = [["user", bang], ["assistant", bang]]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "overrides.txt").write_text(bang)
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "hunter2" not in page
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert main(["view", str(run)]) == 0
    assert main(["train", f"env={bang}"]) == 2
    said = capsys.readouterr()
    assert "\x1b]" not in said.out + said.err
    (run / "config.yaml").rename(tmp_path / "elsewhere.yaml")
    (run / "config.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    assert main(["report", str(run)]) == 2


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("metrics.jsonl", {"step": 3, "actor/loss": [], "eval/success_once": "<b>", "time/step": {}}),
        ("eval/step_000003/episodes.jsonl", {"task": [1]}),
        ("eval/step_000003/episodes.jsonl", {"return": "much"}),
        ("eval/step_000003/episodes.jsonl", {"logprobs": [[["a", -0.5], ["b", -1.0]]]}),
        ("eval/step_000003/episodes.jsonl", {"logprobs": [[]]}),
        ("eval/step_000003/episodes.jsonl", {"state": [1]}),
        ("eval/step_000003/eval.json", {"dropped": "all", "wall_s": 1, "env_steps": 1}),
        ("eval/step_000003/eval.json", {"dropped": 0, "wall_s": 1, "env_steps": 1, "protocol": [0.5]}),
        ("costs.jsonl", {"wall_s": "long"}),
        ("metrics.jsonl", {"step": 3, "env/steps": math.inf}),
        ("metrics.jsonl", {"step": 3, "time/step": -1.0, "actor/loss": 5e-324}),
        ("metrics.jsonl", {"step": 3, "eval/success_once": -1.0}),
        ("metrics.jsonl", {"step": 3, "eval/success_once": 0.5, "eval/episodes": -6.0}),
        ("metrics.jsonl", {"step": 3, "eval/task_0/success_once": 1e99, "eval/task_1/success_once": 1e99}),
        ("eval/step_000003/eval.json", {"env_steps": math.nan}),
        ("eval/step_000003/eval.json", {"dropped": math.inf}),
        ("eval/step_000003/eval.json", {"wall_s": 10**400}),
        ("eval/step_000003/eval.json", {"protocol": {"name": "p", "departures": 5}}),
    ],
)
def test_values_of_the_wrong_type_are_skipped_or_reported(file, change, tmp_path, capsys):
    run = write_run(tmp_path / "theirs")
    path, name = run / file, change.get("step", "is damaged")
    old = path.read_text().splitlines()[:1] if path.exists() and path.suffix == ".jsonl" else ["{}"]
    path.write_text(json.dumps(json.loads(old[0]) | change) + "\n")
    for command in ("report", "view", "card"):
        code, said = main([command, str(run)]), capsys.readouterr().err
        assert "unexpected" not in said, said
        assert (code, str(name) in said) in ((0, False), (2, True)), said


def test_rows_without_a_step_are_skipped(tmp_path):
    run = write_run(tmp_path / "theirs")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('\n{"train/return": 1.0, "time/step": 1.0}\n{"step": 4, "train/return": 1.0}\n')
    assert [row["step"] for row in read_history(run).rows] == [0, 1, 2, 3, 4]
    for command in ("report", "view", "card"):
        assert main([command, str(run)]) == 0


@pytest.mark.parametrize("value", ['"abc"', "[1]", "true", "1e999", "NaN", "9" * 400], ids=lambda value: value[:5])
def test_results_of_the_wrong_type_are_not_listed(value, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (write_run(tmp_path / "runs" / "a") / "metrics.jsonl").write_text(f'{{"step": 3, "eval/success_once": {value}}}')
    run = write_run(tmp_path / "runs" / "b")
    (run / "metrics.jsonl").unlink()
    table = f'{{"overall": {{"success_once": {value}, "mean_return": 0.5}}}}'
    (run / "eval" / "step_000003" / "eval.json").write_text(table)
    write_run(tmp_path / "runs" / "c")
    assert main(["list", "runs"]) == 0
    capsys.readouterr()
    assert main(["list", "runs", "--json"]) == 0
    results = {row["id"]: (row["success"], row["return"]) for row in json.loads(capsys.readouterr().out)}
    assert results == {"a": (None, None), "b": (None, 0.5), "c": (4 / 6, None)}


@pytest.mark.integration
def test_huge_numbers_in_run_files_do_not_exceed_memory(tmp_path):
    run = write_run(tmp_path / "theirs", "runner.logger.backends=[jsonl]")
    (run / "checkpoints" / "step_400000000").mkdir(parents=True)
    (run / "checkpoints" / "step_400000000" / "manifest.json").write_text("{}")
    for name in ("step_x", "step_0000003", "step_\u0663"):
        shutil.copytree(run / "eval" / "step_000003", run / "eval" / name)
    assert [evaluation.step for evaluation in read_history(run).evaluations] == [0, 3]
    lines = (run / "metrics.jsonl").read_text().splitlines()[:-1]
    rows = [{"step": 500_000_000, "train/return": 1.0}, {"step": 4, "train/return": 10**400}, {"step": 10**400}]
    rows += [{"step": step, "time/step": 1e308} for step in (4, 5)]
    (run / "metrics.jsonl").write_text("\n".join([*lines, *map(json.dumps, rows)]) + "\n")
    for command in ("card", "view", "report"):
        limited = f"ulimit -v {4 << 20}; exec {sys.executable} -m embodyrl {command} {run}"
        done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
    assert "rows of 499999996 training steps are missing" in (run / "CARD.md").read_text()


@pytest.mark.integration
def test_runs_with_thousands_of_tasks_and_suites_are_summarized_quickly(tmp_path):
    run = write_run(tmp_path / "theirs")
    for file, success in ((run / f"eval/step_{step:06d}/episodes.jsonl", step > 0) for step in (0, 3)):
        row = json.loads(file.read_text().splitlines()[0]) | {"success_once": success, "success_at_end": success}
        rows = ({"episode": k, "task_id": k, "reset_id": k, "task": f"t{k}"} for k in range(9000))
        suites = ("" if k < 8000 else f"s{k}" for k in range(9000))
        file.write_text("".join(json.dumps(row | r | {"suite": s}) + "\n" for r, s in zip(rows, suites, strict=True)))
    metrics = {"step": 0} | {f"eval/s{k}/success_once": 0.5 for k in range(1000)}
    (run / "metrics.jsonl").write_text(json.dumps(metrics) + "\n" + (run / "metrics.jsonl").read_text())
    (run / "env.txt").write_text("gpu A\n" * 200_000)
    for command in ("card", "report"):
        limited = f"ulimit -t 15; exec {sys.executable} -m embodyrl {command} {run}"
        done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.returncode, done.stderr[-300:])
    card = json.loads((run / "card.json").read_text())
    assert [len(results["rows"]) for results in card["figures"]] == [1 + 1001 + 8000] * 2
    assert [len(card["change"]), card["change"][0]["p"]] == [1001, 0.0]


@pytest.mark.parametrize(("task_id", "code"), [(3, 0), (10**9, 2), (-1, 2)])
def test_task_ids_of_episodes_are_limited(task_id, code, tmp_path, capsys):
    run = write_run(tmp_path / "theirs")
    file = run / "eval" / "step_000003" / "episodes.jsonl"
    file.write_text(file.read_text().replace('"task_id": 1', f'"task_id": {task_id}'))
    assert main(["view", str(run)]) == code
    assert ("task_id: Input should be" in capsys.readouterr().err) == (code == 2)


@pytest.mark.integration
def test_parquet_decompression_bomb_is_rejected(tmp_path, monkeypatch):
    from embodyrl.text.dataset import open_rows
    from embodyrl.text.settings import RowSettings

    (tmp_path / "memory.max").write_text(str(1 << 30))  # in a container of 1 GiB: more of the file need not be read
    (tmp_path / "memory.current").write_text("0")
    monkeypatch.setattr(files, "CGROUP", tmp_path)
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(200_000, np.int32)), pa.array(["x" * 1_000_000]))
    table = pa.table({"prompt": text, "answer": text})
    parquet.write_table(table, tmp_path / "bomb.parquet", store_schema=False)
    assert (tmp_path / "bomb.parquet").stat().st_size < 4_000_000
    with pytest.raises(ConfigError, match="unpacks to more than"):
        open_rows(RowSettings(path=str(tmp_path / "bomb.parquet")), tokenizer=None)


def test_folder_without_weights_does_not_query_the_hub(tmp_path):
    from embodyrl.policies.causal_lm.settings import TextLoraSettings

    loading = pytest.importorskip("embodyrl.policies.causal_lm.model")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "gpt2"}')
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is missing"):
        loading.add_adapters(None, model_of("causal_lm", lora=TextLoraSettings(path=str(tmp_path))), trainable=False)
    (tmp_path / "config.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "gpt2"):
        with pytest.raises(CheckpointError, match="does not contain a full model"):
            loading.load(folder, dtype=None)


def test_symlink_loops_and_an_empty_config_are_reported(tmp_path, capsys):
    run = write_run(tmp_path / "theirs")
    for name in ("env.txt", "overrides.txt", "logs/events.log"):
        (run / name).unlink()
        (run / name).symlink_to(run / name)
    assert main(["report", str(run)]) == main(["card", str(run)]) == main(["view", str(run)]) == 0
    (run / "config.yaml").write_text("")
    assert main(["view", str(run)]) == 2
    assert "config.yaml: runner.max_steps is not a number. Restore the file" in capsys.readouterr().err
