"""Language instruction and success of an episode, read from a Gymnasium environment's observation and info."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.gym.spaces import Path, member
from embodyrl.errors import EnvError

_SUCCESS = ("success", "is_success", "succeed")
_LISTED = 20
"""Maximum number of keys of info in the banner."""
_LAST = ("final_obs", "final_observation", "terminal_observation")
"""Possible keys of the final observation in `info`, for environments that reset themselves at the end of an episode."""
_INSTRUCTION = ("instruction", "language_instruction", "task_description", "mission", "prompt")
"""Possible keys of the instruction, in an observation or in `info`, sorted from the most common to the least common."""
_ATTRIBUTES = ("task_description", "task")
"""Attributes of LeRobot's environments that contain the instruction."""


def success_key(cfg: GymSettings) -> tuple[str, ...]:
    """Return the possible keys of the success flag in info; the first key that exists is used."""
    return _SUCCESS if cfg.success_key is None else (cfg.success_key,)


def succeeded(info: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """Return the success flag in `info` (an array for a batch); False if the flag is missing or None."""
    found = next((value for key in keys if (value := _find(info, key)) is not None), None)
    return False if found is None else found


def ended(seen: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the observation and the info of the last step of an episode.

    An environment that resets itself returns the observation of the next episode, and stores the last one in `info`.
    """
    last = next((info[key] for key in _LAST if info.get(key) is not None), seen)
    final = info.get("final_info")
    return last, {**info, **final} if isinstance(final, dict) else info


def says_success(info: Mapping[str, Any], keys: Sequence[str]) -> bool:
    """Return True if `info`, or its `final_info`, has one of the success keys."""
    return any(_find(part, key) is not None for part in (info, info.get("final_info")) for key in keys)


def success_source(infos: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    """Describe where success is read, for the banner; without a success key in `infos`, list the keys of info."""
    found = next((key for info in infos for key in keys if says_success(info, (key,))), None)
    names = [*dict.fromkeys(name for info in infos for name in names_of(info))]
    listed = ", ".join([*names[:_LISTED], *(["..."] if names[_LISTED:] else [])]) or "none"
    return f"unknown; keys of info: {listed}" if found is None else f"info['{found}']"


def names_of(info: Any, before: str = "") -> Iterator[str]:
    """Yield the dotted names of all numbers, flags and arrays in nested mappings."""
    for key, value in info.items() if isinstance(info, Mapping) else ():
        if isinstance(value, Mapping):
            yield from names_of(value, f"{before}{key}.")
        elif isinstance(value, (bool, int, float, np.generic, np.ndarray)) and not str(key).startswith("_"):
            yield f"{before}{key}"


def instruction_of(
    cfg: GymSettings, texts: Sequence[tuple[str, Path]], seen: Any, info: Mapping[str, Any], env: Any = None
) -> str | None:
    """Return the instruction of an episode from its first observation and info; None if there is no instruction.

    Raises:
        EnvError: the key `env.instruction_key` is missing, or its value is not a string.
    """
    if cfg.instruction is not None:
        return cfg.instruction
    if cfg.instruction_key is not None:
        found = [value for source in (seen, info) if (value := _find(source, cfg.instruction_key)) is not None]
        if found and (text := words(found[0])) is not None:
            return text
        there = ", ".join([*(name for name, _ in texts), *map(str, info)]) or "none"
        what = f"is {found[0]!r:.60}, which is not a string" if found else "does not exist"
        raise EnvError(
            f"env '{cfg.id}': env.instruction_key={cfg.instruction_key} {what}. Text observations and info keys "
            f"after reset: {there}. Set env.instruction_key to one of these keys, or set env.instruction."
        )
    if texts:
        ranks = {name: rank for rank, name in enumerate(_INSTRUCTION)}
        _, path = min(texts, key=lambda text: ranks.get(text[0].rpartition(".")[2], len(ranks)))
        return words(member(seen, path))
    if (text := next((t for name in _INSTRUCTION if (t := words(info.get(name))) is not None), None)) is not None:
        return text
    has = getattr(env, "has_wrapper_attr", lambda _: False)
    return next((t for name in _ATTRIBUTES if has(name) and (t := words(env.get_wrapper_attr(name))) is not None), None)


def words(value: Any) -> str | None:
    """Convert a string, bytes, or an array of one string to str; None for blank text and other values."""
    found = value.item() if isinstance(value, np.ndarray) and value.size == 1 else value
    found = found.decode(errors="replace") if isinstance(found, bytes) else found
    return str(found) if isinstance(found, str) and found.strip() else None


def _find(source: Any, key: str) -> Any:
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
