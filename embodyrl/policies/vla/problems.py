"""Checks of an environment against the requirements of image policies."""

from embodyrl.policies.protocol import fitting_models
from embodyrl.types import ActionKind, EnvSpec


def seen_problems(who: str, env: EnvSpec) -> list[str]:
    """Return the requirements of an image policy with box actions that an environment does not meet, one line each."""
    if not env.cameras.names or env.action.kind != ActionKind.box:
        has = f"{len(env.cameras.names)} cameras and {env.action.kind} actions"
        return [
            f"{who} reads camera images and outputs box actions, but env '{env.name}' has {has}; choose another "
            f"model, for example {fitting_models(env)}."
        ]
    if env.cameras.rotation_deg not in (0, 180):
        return [f"env '{env.name}' declares cameras.rotation_deg={env.cameras.rotation_deg}; only 0 and 180 work."]
    return []
