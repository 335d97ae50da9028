"""Links, pipes and damaged values in folders from untrusted sources."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from run_files import write_run, write_video
from safetensors.torch import save_file
from settings import model_of
from toy_runs import TOY_OFT, resume_toy, toy_config, train_toy

from embodyrl.cli.main import main
from embodyrl.commands.sft_data import with_statistics
from embodyrl.errors import CheckpointError, ConfigError, EmbodyError
from embodyrl.plan.config import load_with_ckpt
from embodyrl.plan.environment import env_spec
from embodyrl.policies.causal_lm.model import load
from embodyrl.reports.card import build_card
from embodyrl.reports.history import read_history
from embodyrl.text.rewards.services import VALUE_FILE, RewardModel


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_toy(tmp_path_factory.mktemp("trained"), "runner.max_steps=1")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    return train_toy(tmp_path_factory.mktemp("evaluated"), "runner.max_steps=1", "runner.val_check_interval=1")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "theirs"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name", ["env.txt", "overrides.txt", "costs.jsonl", "logs/events.log", "lock", "logs", "checkpoints", "tensorboard"]
)
def test_resume_and_prune_write_nothing_outside_the_run(name, run, tmp_path, capsys):
    victim = tmp_path / "victim"
    victim.mkdir()
    if (run / name).exists():
        (run / name).rename(victim / "file")
    else:
        (victim / "file").write_text("precious")
    (run / name).symlink_to(victim / "file")
    before = contents(victim)
    assert main(["train", "--resume", str(run), "trust=true", "runner.max_steps=2"]) != 0
    assert str(run) in capsys.readouterr().err
    assert main(["ckpt", "prune", str(run), "--keep", "1"]) != 0
    assert contents(victim) == before
    assert name == "lock" or not (run / "lock").exists()


@pytest.mark.parametrize("name", ["overrides.txt", "logs/events.log", "env.txt"])
def test_resume_does_not_open_pipes(name, run):
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(ConfigError, match="not a regular file"):
        resume_toy(run, "runner.max_steps=2")


@pytest.mark.parametrize("name", ["environment.yaml", "config.yaml", "eval/step_000001/eval.json"])
def test_export_does_not_copy_linked_files(name, run, tmp_path, capsys):
    secret, file = tmp_path / "secret", run / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        file.rename(secret)
    else:
        secret.write_text("PRIVATE KEY")
    file.symlink_to(secret)
    assert main(["ckpt", "export", str(run), str(tmp_path / "out"), "trust=true"]) != 0
    assert f"'{name}' is outside the folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_report_and_card_do_not_write_through_links(tmp_path):
    run, victim = write_run(tmp_path / "runs" / "theirs"), tmp_path / "victim"
    victim.write_text("precious")
    names = ("report.html", "CARD.md", "card.json")
    scratch = [run / f".tmp-{os.getpid()}-{name}" for name in names]
    for link in (*scratch, *(run / name for name in names)):
        link.symlink_to(victim)
    for command in ("report", "card"):
        assert main([command, str(run)]) == 0
    assert victim.read_text() == "precious"
    assert all((run / name).stat().st_size and not (run / name).is_symlink() for name in names)
    for link in scratch:
        link.unlink()


LINKED = {
    "openvla_oft_tiny": ("tokenizer.model", *TOY_OFT),
    "act": ("policy_x_processor.safetensors", "model=act"),
    "pi05_tiny": ("policy_x.safetensors", "model=pi05_tiny"),
}


@pytest.mark.parametrize("model", LINKED)
def test_linked_side_files_of_a_model_are_not_copied(model, tmp_path):
    """A copy in a checkpoint is a regular file, so exports and uploads would contain the linked file."""
    (name, *words), secret = LINKED[model], tmp_path / "secret"
    folder = Path(shutil.copytree(f"assets/{model}", tmp_path / "model"))
    secret.write_text("PRIVATE KEY")
    (folder / name).symlink_to(secret)
    words += [f"model.path={folder}", "runner.max_steps=1"]
    with pytest.raises(EmbodyError, match=f"'{name}' is outside the folder"):
        train_toy(tmp_path, *words)
    target = tmp_path / "start"
    with pytest.raises(CheckpointError, match=f"'{name}' is outside the folder"):
        with_statistics(model_of("mlp", path=str(folder)), target, env_spec(toy_config(tmp_path)), {})
    (folder / name).unlink()
    (folder / "own").write_text("public")
    (folder / name).symlink_to("own")
    run = train_toy(tmp_path, *words, name="other")
    copies = [path.read_text() for path in run.glob(f"checkpoints/*/policy/{name}")]
    assert copies == ([] if model == "act" else ["public"])  # act has no weights, so its processors are new


def test_linked_texts_of_a_language_model_are_not_copied(tmp_path):
    folder, secret = tmp_path / "model", tmp_path / "secret"
    for part in load(Path("assets/causal_lm_tiny"), dtype=torch.float32, seed=0):
        part.save_pretrained(folder)
    secret.write_text("PRIVATE KEY")
    (folder / "model.safetensors").rename(tmp_path / "weights")
    (folder / "model.safetensors").symlink_to(tmp_path / "weights")
    load(folder, dtype=torch.float32)
    (folder / "old").symlink_to("missing")
    for name in ("chat_template.jinja", "additional_chat_templates/x.jinja", "qformer_tokenizer/a/x.jinja", "linked"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).symlink_to(tmp_path if name == "linked" else secret)
        with pytest.raises(CheckpointError, match=f"'{name}' is outside the folder"):
            load(folder, dtype=torch.float32)
        (folder / name).unlink()


@pytest.mark.parametrize("target", ["other", "own"])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "costs.jsonl", "eval/step_000003/eval.json", "eval/step_000003/episodes.jsonl"]
)
def test_results_behind_links_to_other_runs_are_not_shown(name, target, tmp_path):
    run = write_run(tmp_path / "runs" / "theirs")
    (run / "costs.jsonl").write_text('{"wall_s": 3600, "cpu_s": 7200, "gpus": 2}\n')
    complete = build_card(run)
    place = run.parent / "other" / "file" if target == "other" else (run / name).with_name("moved")
    place.parent.mkdir(exist_ok=True)
    (run / name).rename(place)
    (run / name).symlink_to(place)
    card = build_card(run)
    values = (bool(read_history(run).rows), "gpu_hours" in card["costs"], len(card["figures"]))
    if target == "other":
        assert values == (name != "metrics.jsonl", name != "costs.jsonl", 1 + ("step" not in name))
    else:
        assert card == complete


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_repositories_with_kernels_in_a_config_are_ignored(key, tmp_path):
    for part in load(Path("assets/causal_lm_tiny"), dtype=torch.float32, seed=0):
        part.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {key: "stranger/kernels"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for seed in (0, None):
        assert load(tmp_path, dtype=torch.float32, seed=seed)[0].config._attn_implementation == "sdpa"


def test_report_does_not_embed_videos_of_a_linked_folder(tmp_path, monkeypatch):
    run = write_run(tmp_path / "runs" / "Videos")
    private = write_video(tmp_path / "home" / "Videos" / "private.mp4")
    own = write_video(run / "own" / "Videos" / "step.mp4")
    (run / "l").symlink_to(tmp_path / "home")
    monkeypatch.chdir(run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    expected = {"l": None, "l/../l": None, "own": own, "l/../own": own, str(run / "own"): own}
    for base, video in expected.items():
        config["video_cfg"]["base_dir"] = base
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        assert read_history(run).find_video((video or private).name) == video, base


@pytest.mark.parametrize("change", [{"video_cfg": [1]}, {"video_cfg": {"base_dir": 5}}, {"runner": 3}, {"seed": [1]}])
def test_settings_of_the_wrong_type_are_skipped_or_reported(change, tmp_path, capsys):
    runs = [write_run(tmp_path / name, videos=1) for name in ("a", "b")]
    for run in runs:
        config = yaml.safe_load((run / "config.yaml").read_text()) | change
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    for command in (["report", *map(str, runs)], ["view", str(runs[0])], ["card", str(runs[0])]):
        assert (main(command), "runner" in change and command[0] == "view") in ((0, False), (2, True))
        assert "unexpected" not in capsys.readouterr().err


def test_addresses_and_folders_of_a_run_are_not_inherited(run, tmp_path):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["serve"] = {"host": "0.0.0.0", "port": 1}
    config["runner"]["output_dir"] = str(tmp_path / "elsewhere")
    config["video_cfg"]["base_dir"] = str(tmp_path / "elsewhere")
    config["collect"] = {"out": str(tmp_path / "elsewhere"), "images": "mp4"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    served = load_with_ckpt("serve", [f"ckpt={run}", "trust=true"])
    assert (served.serve.host, served.serve.port) == ("127.0.0.1", 8000)
    collected = load_with_ckpt("collect", [f"ckpt={run}", "trust=true"]).collect
    assert (collected.out, collected.images) == (None, "mp4")
    for command in ("train", "eval"):
        cfg = load_with_ckpt(command, [f"ckpt={run}", "trust=true"])
        assert (cfg.runner.output_dir, cfg.video_cfg.base_dir) == ("runs", None)
    config["runner"]["output_dir"] = str(tmp_path)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert load_with_ckpt("eval", [f"ckpt={run}", "trust=true"]).runner.output_dir == str(tmp_path)


def test_warnings_contain_no_control_characters(run, capfd):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["runner"]["logger"]["project_name"] = "p\x1b]0;owned\x07\x9b31m\u202e"
    config["runner"]["logger"]["backends"] = ["console", "jsonl"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "--resume", str(run), "trust=true", "runner.max_steps=2"]) == 0
    logging.lastResort.handle(logging.makeLogRecord({"msg": "p\x1b]0;logged\x07", "levelno": logging.ERROR}))
    text = "".join(capfd.readouterr())
    assert {"p?]0;owned??31m?", "p?]0;logged?"} <= {*text.split()} | {w.rpartition("=")[2] for w in text.split()}
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*text}


@pytest.mark.parametrize("has_metrics", [True, False])
def test_view_shows_names_of_a_run_without_markup_and_control_characters(has_metrics, tmp_path, capsys):
    run = write_run(tmp_path / "runs" / "theirs[red]")
    metrics = {"step": 3, "eval/task_0/success_once": 0.5, "eval/task_1/success_once": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(metrics) if has_metrics else "")
    for file in run.glob("eval/*/episodes.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            row |= {"task": f"open [/{row['task_id']}]\x1b]0;x\x07", "suite": f"[red]{row['task_id']}\x1b]0;x\x07"}
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["view", str(run)]) == 0
    out = capsys.readouterr().out
    second = "open [/1]?]0;x?" if has_metrics else "suite [red]1?]0;x?"
    assert [name for name in ("theirs[red]", "open [/0]?]0;x?", second) if name not in out] == []
    assert not {"\x1b", "\x07"} & {*out}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: [*lines, lines[0]], "an episode occurs twice"),
        (lambda lines: [*lines[:-1], lines[-1][:40]], "differ from eval.json"),
        (lambda lines: [lines[0].replace('"return": ', '"return": 1e6'), *lines[1:]], "differ from eval.json"),
        (lambda lines: [re.sub('"return": [^,]*', '"return": NaN', lines[0]), *lines[1:]], "a return is not finite"),
    ],
    ids=["duplicate", "cut", "changed", "nan"],
)
def test_changed_results_are_reported(change, problem, evaluated, tmp_path, capsys):
    run = Path(shutil.copytree(evaluated, tmp_path / "run"))
    assert read_history(run).evaluations[-1].episodes
    file = run / "eval" / "step_000001" / "episodes.jsonl"
    file.write_text("\n".join(change(file.read_text().splitlines())) + "\n")
    for command in (["report", str(run)], ["card", str(run)], ["ckpt", "export", str(run), str(tmp_path / "out")]):
        assert main([*command, "trust=true"] if command[0] == "ckpt" else command) == 2
        assert problem in capsys.readouterr().err


@pytest.mark.parametrize("result", ["overall", "tasks"])
@pytest.mark.parametrize(
    "change",
    [
        {"success_once": 1.0},
        {"episodes": 500},
        {"episodes": "<img src=https://evil>\n\n# Official"},
        {"mean_return": [1]},
        {"task_id": 7},
    ],
    ids=str,
)
def test_changed_tables_of_results_are_reported(result, change, evaluated, tmp_path, capsys):
    run = Path(shutil.copytree(evaluated, tmp_path / "run"))
    file = run / "eval" / "step_000001" / "eval.json"
    table = json.loads(file.read_text())
    (table["overall"] if result == "overall" else table["tasks"][0]).update(change)
    file.write_text(json.dumps(table))
    for command in (["card", str(run)], ["ckpt", "export", str(run), str(tmp_path / "out"), "trust=true"]):
        assert main(command) == 2
        assert "differ from eval.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_model_card_contains_results_of_the_episodes_without_markup(evaluated, tmp_path):
    run = Path(shutil.copytree(evaluated, tmp_path / "run"))
    folder = run / "eval" / "step_000001"
    rows = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    for row in rows:
        row["task"] = "x</td><img src=https://evil> [click](javascript:a) | b\n\n# Official\n\x1b]0;"
    (folder / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = json.loads((folder / "eval.json").read_text())
    table["overall"] |= {"low": "<img src=https://evil>", "high": 1.0}
    (folder / "eval.json").write_text(json.dumps(table))
    assert main(["ckpt", "export", str(run), str(tmp_path / "out"), "trust=true"]) == 0
    text = (tmp_path / "out" / "README.md").read_text().split("\n---\n", 1)[1]
    assert "Official" in text
    score = read_history(run).evaluations[-1].score()
    low, high = score.interval
    assert f"| **all** | {score.value:.3f} | {low:.3f} to {high:.3f} | {len(rows)} |" in text
    assert not re.search(r"^# Official|<img|://|[^\\]\]\(|\x1b", text, re.MULTILINE)


def test_links_inside_the_run_are_accepted(run, tmp_path):
    (run / "wandb").mkdir()
    (run / "wandb" / "latest-run").symlink_to("../logs")
    resume_toy(run, "runner.max_steps=2")
    assert (run / "checkpoints" / "step_000002").is_dir()


@pytest.mark.parametrize("name", ["processor_config.json", "audio_tokenizer_config.json", "tokenizer_config.json"])
def test_programs_in_the_folder_of_a_processor_are_not_run(name, tmp_path, monkeypatch):
    """transformers ignores trust_remote_code=False here, and shows a prompt that `yes | embodyrl ...` answers."""
    folder = Path(shutil.copytree("assets/vision_lm_tiny", tmp_path / "model"))
    load(folder, dtype=torch.float32, seed=0, reads_images=True)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'x')\nclass Evil: pass\n")
    (folder / "audio").mkdir()
    shutil.copy(folder / "evil.py", folder / "audio")
    code = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    (folder / "audio" / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": code}))
    audio = {"audio_tokenizer_class": "AutoModel", "audio_tokenizer_name_or_path": str(folder / "audio")}
    contents = {path.name: json.loads(path.read_text()) for path in folder.glob("*_config.json")}
    if name == "processor_config.json":
        contents[name]["audio_tokenizer"] = audio
    elif name == "audio_tokenizer_config.json":
        contents[name] = audio
    else:
        contents["processor_config.json"].pop("processor_class")
        contents[name].pop("processor_class", None)
        contents[name] |= {"auto_map": code, "tokenizer_class": "Evil"}
    for path, content in contents.items():
        (folder / path).write_text(json.dumps(content))
    stdin = io.StringIO("y\n" * 9)
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(CheckpointError, match=r"audio tokenizer of the processor|contains custom code"):
        load(folder, dtype=torch.float32, seed=0, reads_images=True)
    assert sys.stdin is stdin
    assert not (tmp_path / "ran").exists()


def test_weights_outside_a_model_folder_are_not_read(tmp_path):
    """A user's private weights would be copied into checkpoints, which may be published."""
    folder, private = tmp_path / "model", tmp_path / "private"
    for seed, path in enumerate((folder, private)):
        for part in load(Path("assets/causal_lm_tiny"), dtype=torch.float32, seed=seed):
            part.save_pretrained(path)
    own = load(folder, dtype=torch.float32)[0].state_dict()
    index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(own, "../private/model.safetensors")})
    (folder / "x.safetensors.index.json").write_text(index)
    config = json.loads((folder / "config.json").read_text()) | {"transformers_weights": "x.safetensors.index.json"}
    (folder / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(load(folder, dtype=torch.float32)[0].state_dict(), own)
    reward = RewardModel(folder)
    (folder / VALUE_FILE).parent.mkdir()
    save_file({"weight": torch.ones(1, 128), "bias": torch.zeros(1)}, folder / VALUE_FILE)
    reward.prepare()
    score = reward("1+", "2", "")
    (folder / "model.safetensors").rename(folder / "weights-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(index.replace("../private/model", "weights-1"))
    reward.prepare()
    assert reward("1+", "2", "") == score
    (folder / "model.safetensors.index.json").write_text(index)
    for read in (reward.prepare, lambda: load(folder, dtype=torch.float32)):
        with pytest.raises(CheckpointError, match=r"'../private/model.safetensors' is outside the folder"):
            read()
