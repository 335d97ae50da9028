"""Export a checkpoint to a folder in the model's published layout (adapters merged, model card); upload to the hub."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from embodyrl.channels.messages import POLICY_FOLDER
from embodyrl.checkpoint.store import CheckpointStore, parse_step
from embodyrl.commands.eval_result import summarize_episodes
from embodyrl.config.paths import HUB_NAME, resolve_asset
from embodyrl.data.cards import read_card
from embodyrl.data.checks import check_layout
from embodyrl.data.layout import INFO_PATH
from embodyrl.data.settings import DemonstrationSettings
from embodyrl.data.tables import find_file, read_info
from embodyrl.errors import ConfigError
from embodyrl.files import replace_atomically
from embodyrl.hub import convert_hub_errors
from embodyrl.monitor.history import EPISODES_FILE, TABLE_FILE, check_results, read_episodes, read_table
from embodyrl.plan.config import load_saved_config
from embodyrl.plan.environment import env_spec
from embodyrl.plan.saved import ENVIRONMENT_FILE, EXPORTED_CONFIG, find_start_folder
from embodyrl.plan.schema import Config
from embodyrl.policies import export_policy
from embodyrl.policies.inputs import INPUTS_FILE
from embodyrl.reports.card import escape_markdown
from embodyrl.text.specs import ANY_TEXT
from embodyrl.types import EnvSpec
from embodyrl.version import __version__

_UNUSED_KEYS = ("data", "reward", "rollout", "runner", "algorithm.reference_url", "objective")
"""Config sections and keys that an export ignores, so their code and addresses need no `trust=true`."""


def export(run: Path, step: int, out: Path, *, overrides: Sequence[str] = ()) -> Path:
    """Export the policy of a checkpoint to a new folder; an error leaves no incomplete folder.

    Args:
        run: run folder.
        step: step of the checkpoint.
        out: new folder.
        overrides: `trust=true` if the run uses code that is not installed.

    Raises:
        CheckpointError: the checkpoint is damaged; the message names the file.
        ConfigError: `out` exists.
    """
    if out.exists():
        raise ConfigError(f"{out} already exists. Choose another folder for the export.")
    store = CheckpointStore(run / "checkpoints")
    manifest = store.verify(store.path(step))
    cfg = load_saved_config(run, overrides, unused_keys=_UNUSED_KEYS)
    if cfg.model.is_compiled:  # merging the weights needs no inference
        keys = {"compile", "cuda_graphs"} & {*type(cfg.model).model_fields}
        cfg = load_saved_config(run, [*overrides, *(f"model.{key}=false" for key in keys)], unused_keys=_UNUSED_KEYS)
    source = store.path(step) / POLICY_FOLDER
    with replace_atomically(out) as scratch:
        if cfg.model.trains_adapters:
            model = cfg.model
            if start := find_start_folder(run):
                model = model.model_copy(update={"path": str(start)})
            export_policy(model, _training_env_spec(cfg), source, scratch)
            if (source / INPUTS_FILE).is_file():
                shutil.copyfile(source / INPUTS_FILE, scratch / INPUTS_FILE)
        else:
            shutil.copytree(source, scratch)
        shutil.copyfile(find_file(run, "config.yaml"), scratch / EXPORTED_CONFIG)
        if (run / ENVIRONMENT_FILE).is_file():
            shutil.copyfile(find_file(run, ENVIRONMENT_FILE), scratch / ENVIRONMENT_FILE)
        (scratch / "README.md").write_text(_build_card(run, cfg, step, manifest.meta), encoding="utf-8")
    return out


def _training_env_spec(cfg: Config) -> EnvSpec:
    """Return the environment spec of a run's policy; for a language model, a generic spec that fits all rows."""
    if not cfg.has("data"):
        return env_spec(cfg)
    if not isinstance(cfg.data, DemonstrationSettings):
        return ANY_TEXT
    return read_card(resolve_asset(str(cfg.data.path)), cfg.data).env


def _build_card(run: Path, cfg: Config, step: int, meta: Any) -> str:
    trained = cfg.is_train_command
    method = cfg.algorithm.method if trained else "supervised"
    base = (cfg.ckpt if trained else None) or cfg.model.weights or cfg.model.model_type
    title, data_name = f"{run.name}, step {step}", str(meta.get("env") or meta.get("data"))
    table_file, episodes_file = (find_file(run, f"eval/step_{step:06d}/{name}") for name in (TABLE_FILE, EPISODES_FILE))
    results: list[dict[str, Any]] = []
    if read_table(table_file.parent):
        check_results(table_file.parent, rows := read_episodes(episodes_file))
        results = [asdict(result) for result in summarize_episodes(rows)]
    template = Path(__file__).with_name("model_card.md").read_text(encoding="utf-8")
    return template.format(
        metadata=_format_metadata(cfg, title, base, results, data_name),
        title=escape_markdown(title),
        version=__version__,
        command="train" if trained else "dagger" if cfg.command == "dagger" else "sft",
        step=step,
        seed=cfg.seed,
        base=escape_markdown(base),
        about="environment" if trained else "data",
        env=escape_markdown(data_name),
        trained=f"{method}{', low-rank adapters (merged here)' if cfg.model.trains_adapters else ''}",
        precision=cfg.model.precision_name,
        results=_format_results(results),
    )


def _format_metadata(cfg: Config, title: str, base: str, results: Sequence[Mapping[str, Any]], data_name: str) -> str:
    """Return the YAML header of a model card, from which the hub lists the model and its evaluation.

    `results` contains the results of each task and of all tasks; empty: not evaluated. Local folders are left out: the
    hub accepts repository names only.
    """
    from huggingface_hub import EvalResult, ModelCardData

    data = cfg.data
    is_text = cfg.has("data") and not isinstance(data, DemonstrationSettings)
    task = "text-generation" if is_text else "robotics"
    sets = [data.path, *getattr(data, "more", [])] if cfg.has("data") else []
    datasets = [f"{name['owner']}/{name['name']}" for path in sets if path and (name := _match_hub_name(path))]
    public = _match_hub_name(base)
    has_success = bool(results) and results[-1]["success_once"] is not None
    metric, value = ("success_rate", "success_once") if has_success else ("return", "mean_return")
    results_by_task = [
        EvalResult(
            task_type=task,
            dataset_type=data_name,
            dataset_name=data_name,
            dataset_config=row["task"],
            metric_type=metric,
            metric_value=round(row[value], 4),
        )
        for row in results
        if row[value] is not None
    ]
    card = ModelCardData(
        library_name="embodyrl",
        pipeline_tag=task,
        tags=["robotics", "reinforcement-learning", "embodyrl"],
        base_model=f"{public['owner']}/{public['name']}" if public else None,
        datasets=datasets or None,
        model_name=title,
        eval_results=results_by_task or None,
    )
    return card.to_yaml()


def _match_hub_name(path: str) -> re.Match[str] | None:
    """Match the owner, name and commit of a hub repository; return None for a folder or a name without a commit."""
    match = HUB_NAME.fullmatch(path)
    return match if match and match["revision"] else None


def _format_results(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of the success rate of each task, or of the return, with 95 % intervals."""
    if not results:
        return "This step was not evaluated.\n"
    has_success = results[-1]["success_once"] is not None
    value, low, high = ("success_once", "low", "high") if has_success else ("mean_return", "return_low", "return_high")
    lines = [f"| task | {'success' if has_success else 'return'} | 95 % interval | episodes |", "|---|---|---|---|"]
    for row in results:
        task = "**all**" if row is results[-1] else escape_markdown(row["task"])
        interval = "" if row[low] is None else f"{row[low]:.3f} to {row[high]:.3f}"
        score = "" if row[value] is None else f"{row[value]:.3f}"
        lines.append(f"| {task} | {score} | {interval} | {row['episodes']} |")
    return "\n".join(lines) + "\n"


def push(source: Path, repo: str, *, private: bool = False, overrides: Sequence[str] = ()) -> str:
    """Upload the newest checkpoint of a run, a given checkpoint, an exported folder, or a data set to the hub.

    Args:
        source: the folder; for a run, the result of `embodyrl ckpt export` is uploaded.
        repo: `owner/name`; created if missing.
        private: a new repository is visible to its owner only.
        overrides: see `export`.

    Returns:
        `owner/name@commit`, for `model.path` or `data.path`.

    Raises:
        ConfigError: the folder contains nothing to upload, or the hub rejects the upload.
        EmbodyError: a link in the folder leads outside.
        CheckpointError: the checkpoint is damaged.
    """
    if dataset := dataset_card(source, repo):
        card, tag = dataset
        return _upload(source, repo, "dataset", private, card, tag)
    if (source / "config.json").is_file():
        return _upload(source, repo, "model", private)
    run, step = _find_checkpoint(source)
    scratch = run / f".push.{os.getpid()}.tmp"
    try:
        return _upload(export(run, step, scratch, overrides=overrides), repo, "model", private)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def dataset_card(source: Path, repo: str) -> tuple[str, str] | None:
    """Return the README text and the git tag for the upload of a data set; the tag is the LeRobot layout version.

    Return None if the folder is not a data set.

    Raises:
        ConfigError: the data set is damaged.
    """
    if not (source / INFO_PATH).is_file():
        return None
    if problems := check_layout(source):
        raise ConfigError(problems)
    template = Path(__file__).with_name("data_card.md").read_text(encoding="utf-8")
    env, version = read_card(source).env.name, read_info(source)["codebase_version"]
    names = {"name": escape_markdown(source.name), "env": escape_markdown(env)}
    return template.format(**names, version=version, repo=repo), version


def _find_checkpoint(source: Path) -> tuple[Path, int]:
    step = parse_step(source.name)
    if source.parent.name == "checkpoints" and step is not None and source.is_dir():
        return source.parents[1], step
    steps = CheckpointStore(source / "checkpoints").folders() if (source / "checkpoints").is_dir() else []
    if not steps:
        raise ConfigError(
            f"{source} contains neither a checkpoint, nor an exported policy (config.json), nor a data set. "
            "Pass one of these folders."
        )
    return source, steps[-1]


def _upload(folder: Path, repo: str, kind: str, private: bool, card: str = "", tag: str = "") -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    for path in folder.rglob("*"):
        if path.is_symlink():
            find_file(folder, path.relative_to(folder))
    api = HfApi()
    with convert_hub_errors(
        f"nothing was pushed to {repo}:", "Run the same command again; uploaded files are skipped."
    ):
        api.create_repo(repo, repo_type=kind, private=private, exist_ok=True)
        if card and not (folder / "README.md").exists():
            api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=repo, repo_type=kind)
        commit = api.upload_folder(folder_path=folder, repo_id=repo, repo_type=kind, commit_message="embodyrl push")
        if tag:
            with suppress(HfHubHTTPError):
                api.delete_tag(repo, tag=tag, repo_type=kind)
            api.create_tag(repo, tag=tag, revision=commit.oid, repo_type=kind)
    return f"{repo}@{commit.oid}"
