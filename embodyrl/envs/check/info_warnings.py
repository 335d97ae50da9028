"""Warnings about ignored instructions, success flags and action masks of a Gymnasium environment."""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from embodyrl.envs.gym.episode_info import get_success_keys, iterate_info_names, to_text
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.gym.spaces import Path
from embodyrl.registry import closest

_SUCCESS_PATTERN = re.compile(
    r"succe|solved|accomplish|(goal|target|\bis)_?(reached|achieved|met)|reached_?(goal|target)|\breached\b|complete|"
    r"\b(is_)?(won|win|victory|passed|achieved|finished|at_goal|at_target|in_goal)\b",
    re.IGNORECASE,
)
MASK_PATTERN = re.compile(r"(action|avail|legal|valid)\w*mask|(avail\w*|legal|valid)_?(actions|moves)", re.IGNORECASE)
_INSTRUCTION_PATTERN = re.compile(r"instruct|lang|task|goal|mission|prompt|command", re.IGNORECASE)

MASK_NOT_APPLIED = (
    "policies also sample excluded actions; fix: map excluded actions to valid actions with a wrapper in "
    "env.wrappers, unless excluded actions have no effect"
)


def get_info_warnings(
    cfg: GymSettings,
    texts: Sequence[tuple[str, Path]],
    reset_info: Mapping[str, Any],
    instruction: str | None,
    infos: Sequence[Mapping[str, Any]],
    has_success: bool,
) -> Iterator[str]:
    """Warn about ignored texts, success flags and action masks."""
    yield from instruction_warnings(cfg, texts, reset_info, instruction)
    names = (str(key) for info in (reset_info, *infos) for key in info)
    if (name := next(filter(MASK_PATTERN.search, names), None)) is not None:
        yield f"info['{name}'] is not applied: {MASK_NOT_APPLIED}"
    yield from success_warnings(
        cfg, [*dict.fromkeys(name for info in infos for name in iterate_info_names(info))], has_success
    )


def success_warnings(cfg: GymSettings, names: Sequence[str], has_success: bool) -> Iterator[str]:
    """Warn if `env.success_key` is missing in all steps, or if an unused key of info probably means success.

    `names` are the keys of info in all probed steps. `has_success` is True if a step has a success key.
    """
    if has_success:
        return
    if cfg.success_key is not None:
        help_text = f"{closest(cfg.success_key, names)} Keys of info: {', '.join(names) or 'none'}."
        yield f"env.success_key={cfg.success_key} is not in the info of the probed steps.{help_text}"
        return
    for name in names:
        if _SUCCESS_PATTERN.search(name) or get_close_matches(
            name.rpartition(".")[2].lower(), get_success_keys(cfg), 1, 0.8
        ):
            yield f"info['{name}'] is not read as success; fix: env.success_key={name}, if this key means success"
            return


def instruction_warnings(
    cfg: GymSettings, texts: Sequence[tuple[str, Path]], info: Mapping[str, Any], instruction: str | None
) -> Iterator[str]:
    """Warn about texts in the observation or in info that are not used as the instruction.

    `texts` are the texts of the observation, and `info` is the info of a reset.
    """
    if cfg.instruction is not None or cfg.instruction_key is not None:
        return
    if len(texts) > 1:
        names = ", ".join(name for name, _ in texts)
        yield f"{names} are texts, and only one is used as the instruction; fix: env.instruction_key={texts[0][0]}"
    elif texts and instruction is None:
        yield f"'{texts[0][0]}' is empty, so there is no instruction; fix: env.instruction='...'"
    similar_keys = (key for key, value in info.items() if to_text(value) and _INSTRUCTION_PATTERN.search(str(key)))
    if instruction is None and (key := next(similar_keys, None)) is not None:
        yield f"info['{key}'] is not read as the instruction; fix: env.instruction_key={key}, if it is the instruction"
