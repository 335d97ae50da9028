"""What the figures of an evaluation stand for: how many different episodes, and who has used their initial states."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from embodyrl.config.load import load_saved_config
from embodyrl.config.paths import resolve_asset
from embodyrl.config.schema import Config
from embodyrl.datasets.layout import read_card
from embodyrl.errors import EmbodyError
from embodyrl.runtime.build import Blueprint
from embodyrl.runtime.episodes import count_asked, eval_plan, selected_reset_ids
from embodyrl.runtime.texts import fit_lengths
from embodyrl.types import EnvSpec


def evaluation_facts(blueprint: Blueprint) -> list[tuple[str, str]]:
    """Lines of the banner about an evaluation: its episodes, and whether training or validation used their states."""
    cfg, env = blueprint.cfg, blueprint.env
    plan = eval_plan(cfg, env, blueprint.policy)
    states = {e.reset_id for wave in plan.waves for queue in wave.queues for e in queue}
    how = "sampled" if cfg.eval.sampling_params.do_sample else "greedy"
    text = f"{plan.num_episodes} {how} episodes of {len(states)} initial states"
    if (asked := count_asked(cfg, env)) > plan.num_episodes:
        text += f"; {asked} were asked for, the others would be exact copies of these"
    lines = [("evaluation", text)]
    if blueprint.algorithm is not None:
        shared = states & {*selected_reset_ids(env, cfg.env.train)}
        return [*lines, ("held out", _verdict(len(states), {"training": len(shared)}))]
    if cfg.ckpt is None:
        return lines
    return [*lines, *(("held out", line) for line in _history(cfg.ckpt, states, cfg, env))]


def _history(ckpt: str, states: set[int], cfg: Config, env: EnvSpec) -> Iterator[str]:
    """A line for the run that made a checkpoint, for the run that this one started from, and so on."""
    known: set[Path] = set()
    while (run := _run_of(resolve_asset(ckpt))) is not None and run not in known:
        known.add(run)
        made = load_saved_config(run, ["trust=true"])  # numbers are read of it; nothing that it names is loaded
        used = {f"{what} of {run}": len(states & ids) for what, ids in _used(made, cfg, env).items()}
        yield _verdict(len(states), used) if used else f"unknown: {run} was about something else"
        if made.ckpt is None:
            return
        ckpt = made.ckpt
    yield f"unknown: what {ckpt} was trained on is not recorded"


def _run_of(path: Path) -> Path | None:
    found = (f for f in (path, *path.parents) if (f / "config.yaml").is_file() and (f / "checkpoints").is_dir())
    return next(found, None)


def _used(made: Config, cfg: Config, env: EnvSpec) -> dict[str, set[int]]:
    """Reset ids that each part of a run may have drawn; empty where the run was about another environment."""
    keys = ("env_type", "task_suite_name", "id")
    if all(getattr(made.env, key) == getattr(cfg.env, key) for key in keys):
        splits = fit_lengths(made, env).env
        used = {"training": {*selected_reset_ids(env, splits.train)}}
        validates = made.runner.val_check_interval != -1
        return used | ({"validation": {*selected_reset_ids(env, splits.eval)}} if validates else {})
    try:
        card = read_card(Path(made.data.path)) if made.data.path is not None else None
    except EmbodyError:
        card = None  # the data set is gone, or it is text
    if card is None or card.env.name != env.name:
        return {}
    split = replace(cfg.env.train, task_ids=None, state_ids=card.collected.get("state_ids"))
    return {"demonstrations": {*selected_reset_ids(env, split)}}


def _verdict(states: int, used: dict[str, int]) -> str:
    if not any(used.values()):
        return f"none of these initial states is used by {' or '.join(used)}"
    shares = ", ".join(f"{what} uses {count}" for what, count in used.items())
    return f"warning: of these {states} initial states {shares}; success there says less about others"
