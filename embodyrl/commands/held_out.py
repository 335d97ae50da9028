"""Checks on whether the initial states of an evaluation were used in training or validation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from embodyrl.config.compose import flat
from embodyrl.config.paths import resolve_asset, resolve_run
from embodyrl.config.plain_yaml import read_plain_yaml
from embodyrl.config.settings import format_value, to_builtin
from embodyrl.data.cards import read_card
from embodyrl.envs.settings import EnvSplit
from embodyrl.errors import EmbodyError
from embodyrl.plan.episodes import eval_episodes
from embodyrl.plan.initial_states import rows_of, selected_reset_ids, selected_tasks
from embodyrl.plan.keys import state_keys
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.saved import EXPORTED_CONFIG, read_saved, record_of
from embodyrl.plan.schema import Config
from embodyrl.reports.history import other_worlds
from embodyrl.types import EnvSpec


def held_out_facts(run_plan: RunPlan) -> list[tuple[str, str]]:
    """Return banner lines on how many initial states of an evaluation were used in training or validation."""
    cfg, env = run_plan.cfg, run_plan.env
    states = {e.reset_id for e in eval_episodes(cfg, env, run_plan.policy).episodes}
    if run_plan.algorithm is not None:
        training = run_plan.cfg
        shown = _shown(dict(training.leaves()), env) or {}
        used = {"training": {*selected_reset_ids(env, training.env.train)}, **shown}
        return [("held out", _verdict(len(states), {what: len(states & ids) for what, ids in used.items()}))]
    return [("held out", line) for line in _history(cfg.ckpt, states, cfg, env)] if cfg.ckpt is not None else []


_RENDERING = (
    "render_profile",
    "texture_colorspace",
    *(f"init_params.camera_{part}" for part in ("names", "heights", "widths")),
)


def rendering_facts(run_plan: RunPlan) -> list[tuple[str, str]]:
    """Return a warning if the rendering settings of an evaluation differ from those of the training run."""
    cfg = run_plan.cfg
    if run_plan.algorithm is not None or cfg.ckpt is None or (file := record_of(resolve_run(cfg.ckpt))) is None:
        return []
    made, here = {setting.key: setting.value for setting in read_saved(file)}, dict(cfg.leaves())
    keys = [f"env.{key}" for key in _RENDERING] if made.get("env.env_type") == here["env.env_type"] else []
    changed = [
        f"{key}={format_value(made[key])}" for key in keys if key in made and key in here and made[key] != here[key]
    ]
    fix = f"{' '.join(changed)} renders the images of {cfg.ckpt}'s training"
    return [("rendering", f"warning: the images differ from those of training; {fix}")] if changed else []


def _history(ckpt: str, states: set[int], cfg: Config, env: EnvSpec) -> Iterator[str]:
    """Yield one line for a checkpoint's run and each parent run: the overlap of `states` with the run's states."""
    known: set[Path] = set()
    while (file := record_of(resolve_run(ckpt))) is not None and file not in known:
        known.add(file)
        # Only numbers are read; no component in it is loaded.
        made = flat(read_plain_yaml(file))
        name = ckpt if file.name == EXPORTED_CONFIG else file.parent
        used = {f"{what} of {name}": len(states & ids) for what, ids in _used(made, cfg, env).items()}
        yield _verdict(len(states), used) if used else f"unknown: {name} used another environment, or lost its data"
        start = made.get("model.path")
        if isinstance(made.get("ckpt"), str):
            ckpt = made["ckpt"]
        elif isinstance(start, str) and record_of(resolve_run(start)):  # other initial weights have no record
            ckpt = start
        else:
            return
    yield f"unknown: the training data of {ckpt} is not recorded"


def _used(made: Mapping[str, Any], cfg: Config, env: EnvSpec) -> dict[str, set[int]]:
    """Return the reset ids that a run may have used, by purpose (training, validation, demonstrations).

    The result is empty for a run in another environment.
    """
    keys = ("env_type", "task_suite_name", "id", "axis")
    here = {f"env.{key}": getattr(cfg.env, key, None) for key in keys}
    # Supervised training has no environment, earlier versions had fewer keys.
    if "env.env_type" in made and all(made.get(key, value) == value for key, value in here.items()):
        found, shown = _with_rows_of(made, cfg, env), _shown(made, env)
        if found is None or shown is None:
            return {}
        env = found
        validates = made.get("runner.val_check_interval") != -1 and not _by_expert(made)
        parts = {"training": "train"} | ({"validation": "eval"} if validates else {})
        across = bool(made.get("runner.val_suites"))
        return {what: _drawn(made, split, env, across and split == "eval") for what, split in parts.items()} | shown
    return _shown(made, env) or {}


def _with_rows_of(made: Mapping[str, Any], cfg: Config, env: EnvSpec) -> EnvSpec | None:
    """Return the environment spec with the row split of another run; None if the rows differ."""
    if not cfg.reads_rows:
        return env
    share = made.get("data.val_share")
    if other_worlds(
        made, to_builtin(cfg), {key for key in state_keys() if key.startswith("data.")} - {"data.val_share"}
    ):
        return None
    if cfg.rows.val_path or cfg.rows.val_split or not isinstance(share, float):
        return env
    return replace(env, benchmark=replace(env.benchmark, held_out=round(share * env.states_per_task[0])))


def _shown(made: Mapping[str, Any], env: EnvSpec) -> dict[str, set[int]] | None:
    """Return the reset ids of the demonstrations that a run used; None if a data set is missing or contains text."""
    folders = made.get("algorithm.demonstrations") or []
    if "env.env_type" not in made or _by_expert(made):  # else it is text
        folders = [*folders, made.get("data.path"), *(made.get("data.more") or [])]
    found: dict[str, set[int]] = {}
    for folder in filter(None, folders):
        try:
            card = read_card(resolve_asset(str(folder)))
        except EmbodyError:
            return None
        if card.env.name == env.name:
            ids = _ids_here(env, EnvSplit(state_ids=card.collected.get("state_ids")))
            found.setdefault("demonstrations", set()).update(ids)
    return found


def _by_expert(made: Mapping[str, Any]) -> bool:
    """Return True if the run is a round of `embodyrl dagger`, which trains on demonstrations."""
    return "dagger.rounds" in made


def _drawn(made: Mapping[str, Any], split: str, env: EnvSpec, across: bool) -> set[int]:
    """Return the reset ids that the training split may have sampled, or that the first validation used."""
    ids = made.get(f"env.{split}.state_ids") or rows_of(env, split)
    try:
        values = EnvSplit(task_ids=made.get(f"env.{split}.task_ids"), state_ids=ids)
    except ValidationError:
        return set()  # no config that we wrote
    found = _ids_here(env, values, across=across)
    total, each = made.get("eval.episodes"), made.get("eval.episodes_per_task")
    if split == "train" or not (isinstance(total, int) or isinstance(each, int)):
        return found
    tasks = [sorted(found.intersection(env.reset_ids_of(task))) for task in selected_tasks(env, values, across=across)]
    return {*_first_states(tasks, total or (each or 0) * len(tasks))}


def _ids_here(env: EnvSpec, split: EnvSplit, *, across: bool = False) -> set[int]:
    """Return the reset ids that the split of another run selects in this environment.

    The other run may have more states (`env.sampled_states` of LIBERO); these states are ignored.
    """
    if split.state_ids is not None:
        first, last = split.state_ids
        if first >= (states := min(env.states_per_task)):
            return set()
        split = EnvSplit(task_ids=split.task_ids, state_ids=[first, min(last, states - 1)])
    return {*selected_reset_ids(env, split, across=across)}


def _verdict(states: int, used: dict[str, int]) -> str:
    if not any(used.values()):
        return f"none of these initial states is used by {' or '.join(used)}"
    shares = ", ".join(f"{what} uses {count}" for what, count in used.items())
    return f"warning: of these {states} initial states {shares}; results on these states do not measure generalization"


def _first_states(tasks: Sequence[Sequence[int]], episodes: int) -> Iterator[int]:
    """Yield at most `episodes` reset ids: the first of each task, then the second of each task, and so on."""
    for place in range(min(episodes, len(tasks) * max(map(len, tasks)))):
        lap, task = divmod(place, len(tasks))
        yield from tasks[task][lap : lap + 1]
