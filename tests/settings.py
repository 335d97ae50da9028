"""Settings of single components."""

from typing import Any

from embodyrl.envs import ENVS
from embodyrl.plan.schema import get_algorithm_settings
from embodyrl.policies import POLICIES


def algorithm_of(adv_type: str = "grpo", loss_type: str = "ppo_clip", **keys: Any) -> Any:
    estimator, loss = get_algorithm_settings(adv_type, loss_type)
    own = {key: keys.pop(key) for key in loss.model_fields if key in keys}
    return estimator(adv_type=adv_type, loss_type=loss_type, loss=loss(**own), **keys)


def env_of(env_type: str, **keys: Any) -> Any:
    return ENVS.get(env_type).settings(env_type=env_type, **keys)


def model_of(model_type: str = "openvla_oft", **keys: Any) -> Any:
    return POLICIES.get(model_type).settings(model_type=model_type, **keys)
