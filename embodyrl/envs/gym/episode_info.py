"""Language instruction and success of an episode, read from a Gymnasium environment's observation and info."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.gym.spaces import Path, get_member
from embodyrl.errors import EnvError

_SUCCESS_KEYS = ("success", "is_success", "succeed")
_MAX_LISTED_KEYS = 20
"""Maximum number of keys of info in the banner."""
_FINAL_OBSERVATION_KEYS = ("final_obs", "final_observation", "terminal_observation")
"""Possible keys of the final observation in `info`, for environments that reset themselves at the end of an episode."""
_INSTRUCTION_KEYS = ("instruction", "language_instruction", "task_description", "mission", "prompt")
"""Possible keys of the instruction, in an observation or in `info`, sorted from the most common to the least common."""
_INSTRUCTION_ATTRIBUTES = ("task_description", "task")
"""Attributes of LeRobot's environments that contain the instruction."""


def get_success_keys(cfg: GymSettings) -> tuple[str, ...]:
    """Return the possible keys of the success flag in info; the first key that exists is used."""
    return _SUCCESS_KEYS if cfg.success_key is None else (cfg.success_key,)


def read_success(info: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """Return the success flag in `info` (an array for a batch); False if the flag is missing or None."""
    success = next((value for key in keys if (value := _get_nested(info, key)) is not None), None)
    return False if success is None else success


def get_final_step(observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the observation and the info of the last step of an episode.

    An environment that resets itself returns the observation of the next episode, and stores the last one in `info`.
    """
    last = next((info[key] for key in _FINAL_OBSERVATION_KEYS if info.get(key) is not None), observation)
    final = info.get("final_info")
    return last, {**info, **final} if isinstance(final, dict) else info


def has_success_key(info: Mapping[str, Any], keys: Sequence[str]) -> bool:
    """Return True if `info`, or its `final_info`, has one of the success keys."""
    return any(_get_nested(part, key) is not None for part in (info, info.get("final_info")) for key in keys)


def describe_success_source(infos: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    """Describe where success is read, for the banner; without a success key in `infos`, list the keys of info."""
    success_name = next((key for info in infos for key in keys if has_success_key(info, (key,))), None)
    names = [*dict.fromkeys(name for info in infos for name in iterate_info_names(info))]
    listed_names = ", ".join([*names[:_MAX_LISTED_KEYS], *(["..."] if names[_MAX_LISTED_KEYS:] else [])]) or "none"
    return f"unknown; keys of info: {listed_names}" if success_name is None else f"info['{success_name}']"


def iterate_info_names(info: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all numbers, flags and arrays in nested mappings."""
    for key, value in info.items() if isinstance(info, Mapping) else ():
        if isinstance(value, Mapping):
            yield from iterate_info_names(value, f"{prefix}{key}.")
        elif isinstance(value, (bool, int, float, np.generic, np.ndarray)) and not str(key).startswith("_"):
            yield f"{prefix}{key}"


def read_instruction(
    cfg: GymSettings, texts: Sequence[tuple[str, Path]], observation: Any, info: Mapping[str, Any], env: Any = None
) -> str | None:
    """Return the instruction of an episode from its first observation and info; None if there is no instruction.

    Raises:
        EnvError: the key `env.instruction_key` is missing, or its value is not a string.
    """
    if cfg.instruction is not None:
        return cfg.instruction
    if cfg.instruction_key is not None:
        values = [
            value for source in (observation, info) if (value := _get_nested(source, cfg.instruction_key)) is not None
        ]
        if values and (text := to_text(values[0])) is not None:
            return text
        available_keys = ", ".join([*(name for name, _ in texts), *map(str, info)]) or "none"
        problem = f"is {values[0]!r:.60}, which is not a string" if values else "does not exist"
        raise EnvError(
            f"env '{cfg.id}': env.instruction_key={cfg.instruction_key} {problem}. Text observations and info keys "
            f"after reset: {available_keys}. Set env.instruction_key to one of these keys, or set env.instruction."
        )
    if texts:
        ranks = {name: rank for rank, name in enumerate(_INSTRUCTION_KEYS)}
        _, path = min(texts, key=lambda text: ranks.get(text[0].rpartition(".")[2], len(ranks)))
        return to_text(get_member(observation, path))
    if (
        text := next((string for name in _INSTRUCTION_KEYS if (string := to_text(info.get(name))) is not None), None)
    ) is not None:
        return text
    has_attribute = getattr(env, "has_wrapper_attr", lambda _: False)
    return next(
        (
            string
            for name in _INSTRUCTION_ATTRIBUTES
            if has_attribute(name) and (string := to_text(env.get_wrapper_attr(name))) is not None
        ),
        None,
    )


def to_text(value: Any) -> str | None:
    """Convert a string, bytes, or an array of one string to str; None for blank text and other values."""
    text = value.item() if isinstance(value, np.ndarray) and value.size == 1 else value
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    return str(text) if isinstance(text, str) and text.strip() else None


def _get_nested(source: Any, key: str) -> Any:
    """Return the value of a dotted key in nested mappings and sequences; None if the key is missing."""
    if isinstance(source, Mapping) and key in source:
        return source[key]
    for name in key.split("."):
        if isinstance(source, Mapping):
            source = source.get(name)
        elif isinstance(source, (tuple, list)) and name.isdigit() and int(name) < len(source):
            source = source[int(name)]
        else:
            return None
    return source
