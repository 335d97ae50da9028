"""Config keys for Gymnasium environments."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from embodyrl.config.settings import ChangesStateIds
from embodyrl.envs.settings import EnvSettings, RewardSettings


class GymSettings(EnvSettings, RewardSettings):
    """Config keys for Gymnasium environments."""

    program_keys = ("id",)

    id: Annotated[str | None, ChangesStateIds] = None
    """Gymnasium id, package.module:Class, or owner/name@commit of a Hugging Face repository with an env.py (needs
    trust=true)."""
    kwargs: Annotated[dict[str, Any], ChangesStateIds] = {}
    """Keyword arguments of the environment's constructor."""
    wrappers: Annotated[list[str | dict[str, Any]], ChangesStateIds] = []
    """Wrappers, innermost first: package.module:attr of a callable env -> env, or {name: package.module:attr, argument:
    value}."""

    suite: Annotated[str | None, ChangesStateIds] = None
    """Environment to use if env.id returns several environments: suite or suite/task; null: the first environment."""
    instruction: Annotated[str, Field(min_length=1)] | None = None
    """Language instruction of every episode; null: the environment's instruction."""
    instruction_key: Annotated[str, Field(min_length=1)] | None = None
    """Key of the instruction in the observation or in the info of reset; nested keys are written as a.b."""
    controls: list[dict[str, Any]] = []
    """Keyboard and gamepad inputs in `embodyrl play`, for example [{key: ArrowLeft, pad: axis0-, index: 0, value: -1,
    label: left}]. key: a KeyboardEvent.code. pad: buttonN, axisN+ or axisN- of a gamepad. index, value: the action
    dimension that the input sets, and its value. Default: two keys for each continuous dimension, or a digit for each
    discrete action."""
    neutral: list[float] = []
    """Action while no key or button is pressed; default: zeros."""
    success_key: Annotated[str, Field(min_length=1)] | None = None
    """Key of the success flag in info (nested keys are written as a.b); null: success, is_success or succeed."""

    def problems(self) -> Iterator[str]:
        """Yield errors for conflicting instruction keys and for invalid controls."""
        yield from super().problems()
        if self.instruction is not None and self.instruction_key is not None:
            yield "env.instruction and env.instruction_key are both set; remove one."
        for number, control in enumerate(self.controls):
            if problem := _find_control_problem(control):
                yield f"env.controls[{number}]: {problem}"

    @property
    def wrapper_arguments(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and arguments of each wrapper in `wrappers`."""
        entries = [{"name": item} if isinstance(item, str) else item for item in self.wrappers]
        return [
            (str(item.get("name", "")), {key: value for key, value in item.items() if key != "name"})
            for item in entries
        ]


def _find_control_problem(control: Mapping[str, Any]) -> str:
    """Return the error in an entry of `env.controls`; empty if the entry is valid."""
    types = {"label": str, "key": str, "pad": str, "index": int, "value": (int, float)}
    if invalid := [name for name, value in control.items() if not isinstance(value, types.get(name, ()))]:
        return (
            f"{invalid[0]}={control[invalid[0]]!r} is unknown or has a wrong type; the fields are {', '.join(types)}."
        )
    if missing := [name for name in ("index", "value") if name not in control]:
        return f"{missing[0]} is missing."
    if not control.get("key") and not control.get("pad"):
        return "neither key nor pad is set."
    if control.get("pad") and not re.fullmatch(r"button\d\d?|axis\d\d?[+-]", control["pad"]):
        return f"pad={control['pad']!r} is invalid, expected buttonN, axisN+ or axisN-."
    return ""
