"""A policy or a data set as a repository of the hub, through `huggingface_hub`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.commands.export import export
from embodyrl.datasets.layout import CODEBASE_VERSION, INFO_PATH, read_card
from embodyrl.datasets.reader import check_layout
from embodyrl.errors import ConfigError
from embodyrl.plan.config import hub_errors

_DATA_CARD = """---
tags: [LeRobot, robotics, embodyrl]
task_categories: [robotics]
configs:
- config_name: default
  data_files: data/*/*.parquet
---
# {name}

Demonstrations of {env} in the LeRobot layout {version}, collected with `embodyrl collect`.
Learn from them: `embodyrl sft data.path={repo}`.
"""


def push(source: Path, repo: str, *, private: bool = False, overrides: Sequence[str] = ()) -> str:
    """Upload the newest checkpoint of a run, one of its checkpoints, an exported folder, or a data set.

    Args:
        source: the folder; of a run what `embodyrl ckpt export` writes is uploaded, never the run itself.
        repo: `owner/name`; made where there is none.
        private: a repository that is made is visible to its owner only.
        overrides: `trust=true` where the run's config names code.

    Returns:
        `owner/name@commit`, what `model.path` or `data.path` take.

    Raises:
        ConfigError: nothing that could be uploaded is there, or the hub refuses it; one line.
        CheckpointError: the checkpoint is damaged.
    """
    if (source / INFO_PATH).is_file():
        if problems := check_layout(source):
            raise ConfigError(problems)
        card = _DATA_CARD.format(name=source.name, env=read_card(source).env.name, version=CODEBASE_VERSION, repo=repo)
        return _upload(source, repo, "dataset", private, card)
    if (source / "config.json").is_file():
        return _upload(source, repo, "model", private)
    run, step = _checkpoint(source)
    scratch = run / f".push.{os.getpid()}.tmp"
    try:
        return _upload(export(run, step, scratch, overrides=overrides), repo, "model", private)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _checkpoint(source: Path) -> tuple[Path, int]:
    step = source.name.removeprefix("step_")
    if source.parent.name == "checkpoints" and step.isdecimal() and source.is_dir():
        return source.parents[1], int(step)
    steps = CheckpointStore(source / "checkpoints").folders() if (source / "checkpoints").is_dir() else []
    if not steps:
        raise ConfigError(
            f"{source} is no run with a checkpoint, no exported folder (config.json) and no data set ({INFO_PATH})."
        )
    return source, steps[-1]


def _upload(folder: Path, repo: str, kind: str, private: bool, card: str | None = None) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    with hub_errors(f"nothing was pushed to {repo}:", "Start the same command again; what arrived is not sent twice."):
        api.create_repo(repo, repo_type=kind, private=private, exist_ok=True)
        if card is not None and not (folder / "README.md").exists():
            api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=repo, repo_type=kind)
        done = api.upload_folder(folder_path=folder, repo_id=repo, repo_type=kind, commit_message="embodyrl push")
        if kind == "dataset":  # lerobot looks for its data sets' layout by this tag
            with suppress(HfHubHTTPError):
                api.delete_tag(repo, tag=CODEBASE_VERSION, repo_type=kind)
            api.create_tag(repo, tag=CODEBASE_VERSION, revision=done.oid, repo_type=kind)
    return f"{repo}@{done.oid}"
