"""Config problems that several environments look for, one line each."""

from collections.abc import Collection, Iterator

from embodyrl.config.schema import EnvConfig
from embodyrl.registry import closest


def task_problems(cfg: EnvConfig, count: int, meaning: str) -> Iterator[str]:
    """Yield task ids outside 0..count-1; `meaning` says what the numbers stand for."""
    for split, tasks in (("train", cfg.train.task_ids), ("eval", cfg.eval.task_ids)):
        wrong = [task for task in tasks or () if not 0 <= task < count]
        if wrong:
            yield f"env.{split}.task_ids: {wrong} not in 0..{count - 1} ({meaning})."


def camera_problems(cfg: EnvConfig, known: Collection[str] | None = None) -> Iterator[str]:
    """Yield cameras that do not exist (where they are known beforehand) or are named twice."""
    names = cfg.init_params.camera_names
    for name in names:
        if known is not None and name not in known:
            yield (
                f"env.init_params.camera_names: '{name}' is no camera of env_type '{cfg.env_type}'."
                f"{closest(name, known)} Known: {', '.join(known)}."
            )
    if len(set(names)) < len(names):
        yield f"env.init_params.camera_names={list(names)} names a camera twice."
