"""Config keys for Gymnasium environments."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from embodyrl.config.settings import NumbersStates
from embodyrl.envs.settings import EnvSettings, RewardSettings


class GymSettings(EnvSettings, RewardSettings):
    """Settings of any Gymnasium environment."""

    program_keys = ("id",)

    id: Annotated[str | None, NumbersStates] = None
    """Environment id, package.module:Class, or owner/name@commit: env.py of a repository of the hub (trust=true)."""
    kwargs: Annotated[dict[str, Any], NumbersStates] = {}
    """Keyword arguments of the environment's constructor."""
    wrappers: Annotated[list[str | dict[str, Any]], NumbersStates] = []
    """Wrappers, innermost first: package.module:attr of a callable env -> env, or {name: package.module:attr, k: v}."""

    suite: Annotated[str | None, NumbersStates] = None
    """Environment to use if env.id returns several, as suite or suite/task; null: the first."""
    instruction: Annotated[str, Field(min_length=1)] | None = None
    """Language instruction of every episode; null: the environment's instruction."""
    instruction_key: Annotated[str, Field(min_length=1)] | None = None
    """Key of the instruction in the observation or in the info of reset; nested keys as a.b."""
    controls: list[dict[str, Any]] = []
    """Keyboard and gamepad inputs in `embodyrl play`, each {key: ArrowLeft, pad: axis0-, index: 0, value: -1, label:
    left}. key: a KeyboardEvent.code. pad: buttonN, axisN+ or axisN- of a gamepad. index, value: the dimension that the
    input sets. Default: two keys for each number of the action, or a digit for each category.
    """
    neutral: list[float] = []
    """Action while no input is pressed; default: zeros."""
    success_key: Annotated[str, Field(min_length=1)] | None = None
    """Key of the success flag in info; nested keys as a.b; null: success, is_success or succeed."""

    @property
    def title(self) -> str:
        """Name of the environment in evaluation protocols."""
        return self.id or self.env_type

    def problems(self) -> Iterator[str]:
        """Yield an error for keys that cannot be combined."""
        if self.instruction is not None and self.instruction_key is not None:
            yield "env.instruction and env.instruction_key are both set; remove one."
        for number, each in enumerate(self.controls):
            if problem := _control_problem(each):
                yield f"env.controls[{number}]: {problem}"

    @property
    def wrapped(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and arguments of each wrapper."""
        named = [{"name": item} if isinstance(item, str) else item for item in self.wrappers]
        return [(str(item.get("name", "")), {k: v for k, v in item.items() if k != "name"}) for item in named]


def _control_problem(given: Mapping[str, Any]) -> str:
    """Return the error in a mapping with the fields of a `Control`, or an empty string."""
    kinds = {"label": str, "key": str, "pad": str, "index": int, "value": (int, float)}
    if wrong := [name for name, value in given.items() if not isinstance(value, kinds.get(name, ()))]:
        return f"{wrong[0]}={given[wrong[0]]!r} is unknown or has another type; the fields are {', '.join(kinds)}."
    if missing := [name for name in ("index", "value") if name not in given]:
        return f"{missing[0]} is missing."
    if not given.get("key") and not given.get("pad"):
        return "neither key nor pad is set."
    if given.get("pad") and not re.fullmatch(r"button\d\d?|axis\d\d?[+-]", given["pad"]):
        return f"pad={given['pad']!r} is neither buttonN nor axisN with + or -."
    return ""
