"""Checks on whether the initial states of an evaluation were used in training or validation."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from embodyrl.config.compose import flatten
from embodyrl.config.paths import resolve_asset, resolve_run
from embodyrl.config.plain_yaml import read_plain_yaml
from embodyrl.config.settings import format_value, to_builtin
from embodyrl.data.cards import read_card
from embodyrl.envs.settings import EnvSplit
from embodyrl.errors import EmbodyError
from embodyrl.plan.episodes import eval_episodes
from embodyrl.plan.initial_states import get_state_range, own_tasks, select_reset_ids, select_tasks
from embodyrl.plan.keys import state_keys
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.saved import EXPORTED_CONFIG, find_weights_config, read_saved
from embodyrl.plan.schema import Config
from embodyrl.reports.history import describe_differences
from embodyrl.types import EnvSpec


def held_out_banner_lines(run_plan: RunPlan) -> list[tuple[str, str]]:
    """Return banner lines on how many initial states of an evaluation were used in training or validation.

    The result is empty for a run plan with training that uses none of the states.
    """
    cfg, env = run_plan.cfg, run_plan.env
    states = {episode.reset_id for episode in eval_episodes(cfg, env, run_plan.policy).episodes}
    if run_plan.algorithm is not None:
        demonstration_ids = _get_demonstration_ids(dict(cfg.leaves()), env) or {}
        ids_by_use = {"training": {*select_reset_ids(env, cfg.env.train)}, **demonstration_ids}
        counts = {use: len(states & ids) for use, ids in ids_by_use.items()}
        return [("held out", _describe_overlap(len(states), counts))] if any(counts.values()) else []
    lines = () if cfg.ckpt is None else _describe_history(cfg.ckpt, states, cfg, env)
    return [("held out", line) for line in lines]


_RENDERING_KEYS = (
    "render_profile",
    "texture_colorspace",
    *(f"init_params.camera_{part}" for part in ("names", "heights", "widths")),
)


def rendering_banner_lines(run_plan: RunPlan) -> list[tuple[str, str]]:
    """Return a warning if the rendering settings of an evaluation differ from those of the training run."""
    cfg = run_plan.cfg
    file = find_weights_config(resolve_run(cfg.ckpt)) if run_plan.algorithm is None and cfg.ckpt is not None else None
    if file is None:
        return []
    saved, current = read_saved(file), dict(cfg.leaves())
    keys = [f"env.{key}" for key in _RENDERING_KEYS] if saved.get("env.env_type") == current["env.env_type"] else []
    common = [key for key in keys if key in saved and key in current]
    different = [f"{key}={format_value(saved[key])}" for key in common if saved[key] != current[key]]
    fix = f"{' '.join(different)} renders the images of {cfg.ckpt}'s training"
    return [("rendering", f"warning: the images differ from those of training; {fix}")] if different else []


def _describe_history(ckpt: str, states: set[int], cfg: Config, env: EnvSpec) -> Iterator[str]:
    """Yield one line for a checkpoint's run and each parent run: the overlap of `states` with the run's states."""
    visited: set[Path] = set()
    while (file := find_weights_config(resolve_run(ckpt))) is not None and file not in visited:
        visited.add(file)
        # Only values are read; components that the config names are not imported.
        saved = flatten(read_plain_yaml(file))
        name = ckpt if file.name == EXPORTED_CONFIG else file.parent
        ids_by_use = _get_ids_by_use(saved, cfg, env)
        counts = {f"{use} of {name}": len(states & ids) for use, ids in ids_by_use.items()}
        if not counts:
            yield f"unknown: {name} used another environment, or its data are missing"
        else:
            suggestion = _suggest_unused_states(env, ids_by_use) if any(counts.values()) else ""
            yield _describe_overlap(len(states), counts) + suggestion
        initial_weights = saved.get("model.path")
        if isinstance(saved.get("ckpt"), str):
            ckpt = saved["ckpt"]
        elif isinstance(initial_weights, str) and find_weights_config(resolve_run(initial_weights)):
            # Initial weights without a saved config are not followed further.
            ckpt = initial_weights
        else:
            return
    yield f"unknown: the training data of {ckpt} is not recorded"


def _get_ids_by_use(saved: Mapping[str, Any], cfg: Config, env: EnvSpec) -> dict[str, set[int]]:
    """Return the reset ids that a run may have used, by purpose (training, validation, demonstrations).

    The result is empty for a run in another environment.
    """
    keys = ("env_type", "task_suite_name", "id", "axis")
    current = {f"env.{key}": getattr(cfg.env, key, None) for key in keys}
    # Configs of SFT have no section `env`, and configs of earlier versions have fewer keys.
    if "env.env_type" in saved and all(saved.get(key, value) == value for key, value in current.items()):
        row_spec, demonstration_ids = _with_row_split(saved, cfg, env), _get_demonstration_ids(saved, env)
        if row_spec is None or demonstration_ids is None:
            return {}
        env = row_spec
        validates = saved.get("runner.val_check_interval") != -1 and not _is_dagger_round(saved)
        splits = {"training": "train"} | ({"validation": "eval"} if validates else {})
        all_suites = bool(saved.get("runner.val_suites"))
        return {
            use: _get_possible_ids(saved, split, env, all_suites and split == "eval") for use, split in splits.items()
        } | demonstration_ids
    return _get_demonstration_ids(saved, env) or {}


def _with_row_split(saved: Mapping[str, Any], cfg: Config, env: EnvSpec) -> EnvSpec | None:
    """Return the environment spec with the row split of another run; None if the rows differ."""
    if not cfg.reads_rows:
        return env
    val_share = saved.get("data.val_share")
    if describe_differences(
        saved, to_builtin(cfg), {key for key in state_keys() if key.startswith("data.")} - {"data.val_share"}
    ):
        return None
    if cfg.rows.val_path or cfg.rows.val_split or not isinstance(val_share, float):
        return env
    return replace(env, benchmark=replace(env.benchmark, held_out=round(val_share * env.states_per_task[0])))


def _get_demonstration_ids(saved: Mapping[str, Any], env: EnvSpec) -> dict[str, set[int]] | None:
    """Return the reset ids of the demonstrations that a run used; None if a data set is missing or contains text."""
    folders = saved.get("algorithm.demonstrations") or []
    if "env.env_type" not in saved or _is_dagger_round(saved):  # otherwise data.path contains text
        folders = [*folders, saved.get("data.path"), *(saved.get("data.more") or [])]
    ids_by_use: dict[str, set[int]] = {}
    for folder in filter(None, folders):
        try:
            card = read_card(resolve_asset(str(folder)))
        except EmbodyError:
            return None
        if card.env.name == env.name:
            # Without a range, the data may contain any state.
            undivided = replace(env, benchmark=replace(env.benchmark, held_out=0))
            ids = _select_ids(undivided, EnvSplit(state_ids=card.collected.get("state_ids")))
            ids_by_use.setdefault("demonstrations", set()).update(ids)
    return ids_by_use


def _is_dagger_round(saved: Mapping[str, Any]) -> bool:
    """Return True if the run is a round of `embodyrl dagger`, which trains on demonstrations."""
    return "dagger.rounds" in saved


def _get_possible_ids(saved: Mapping[str, Any], split: str, env: EnvSpec, all_suites: bool) -> set[int]:
    """Return the reset ids that the training split may have sampled, or that the first validation used."""
    ids = saved.get(f"env.{split}.state_ids") or get_state_range(env, split)
    try:
        values = EnvSplit(task_ids=saved.get(f"env.{split}.task_ids"), state_ids=ids)
    except ValidationError:
        return set()  # not a config written by embodyrl
    selected = _select_ids(env, values, all_suites=all_suites)
    total, per_task = saved.get("eval.episodes"), saved.get("eval.episodes_per_task")
    if split == "train" or not (isinstance(total, int) or isinstance(per_task, int)):
        return selected
    tasks = [
        sorted(selected.intersection(env.get_reset_ids(task))) for task in select_tasks(env, values, across=all_suites)
    ]
    # The first state of each task, then the second state of each task, and so on.
    order = [state for states in zip_longest(*tasks) for state in states]
    return {*order[: max(0, total or (per_task or 0) * len(tasks))]} - {None}


def _select_ids(env: EnvSpec, split: EnvSplit, *, all_suites: bool = False) -> set[int]:
    """Return the reset ids that the split of another run selects in this environment.

    The other run may have more states (`env.sampled_states` of LIBERO); these states are ignored.
    """
    if split.state_ids is not None:
        first, last = split.state_ids
        if first >= (states := min(env.states_per_task)):
            return set()
        split = EnvSplit(task_ids=split.task_ids, state_ids=[first, min(last, states - 1)])
    return {*select_reset_ids(env, split, across=all_suites)}


def _describe_overlap(states: int, counts: dict[str, int]) -> str:
    if not any(counts.values()):
        return f"none of these initial states is used by {' or '.join(counts)}"
    uses = ", ".join(f"{use} uses {count}" for use, count in counts.items())
    return f"warning: of these {states} initial states {uses}; results on these states do not measure generalization"


def _suggest_unused_states(env: EnvSpec, ids_by_use: Mapping[str, set[int]]) -> str:
    """Suggest the setting that selects the longest range of unused held-out states; return "" if there is no range."""
    used, tasks = set().union(*ids_by_use.values()), [env.get_reset_ids(task) for task in own_tasks(env)]
    first, last = get_state_range(env, "eval") or (0, min(env.states_per_task) - 1)
    unused = np.setdiff1d(np.arange(first, last + 1), [i - ids.start for ids in tasks for i in used.intersection(ids)])
    longest = max(np.split(unused, np.flatnonzero(np.diff(unused) > 1) + 1), key=len)
    return f"; env.eval.state_ids=[{longest[0]},{longest[-1]}] selects unused states" if len(longest) else ""
