"""Checks of an environment against the requirements of image policies."""

from embodyrl.policies.protocol import suggest_models
from embodyrl.types import ActionKind, EnvSpec


def find_env_problems(model_name: str, env: EnvSpec) -> list[str]:
    """Return the unmet requirements of an image policy with box actions on an environment, one line each."""
    if not env.cameras.names or env.action.kind != ActionKind.box:
        description = f"{len(env.cameras.names)} cameras and {env.action.kind} actions"
        return [
            f"{model_name} reads camera images and outputs box actions, but env '{env.name}' has {description}; choose "
            f"another model, for example {suggest_models(env)}."
        ]
    if env.cameras.rotation_deg not in (0, 180):
        return [f"env '{env.name}' declares cameras.rotation_deg={env.cameras.rotation_deg}; only 0 and 180 work."]
    return []
