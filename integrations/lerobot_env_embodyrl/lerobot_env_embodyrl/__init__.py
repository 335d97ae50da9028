"""Environments of embodyrl in LeRobot. Importing this package registers `--env.type=embodyrl`."""

import gymnasium

from lerobot_env_embodyrl.configuration import GYM_ID, EmbodyrlEnvConfig

__all__ = ["GYM_ID", "EmbodyrlEnvConfig"]

if GYM_ID not in gymnasium.registry:
    # Without Gymnasium's wrappers, because LeRobot reads attributes of the environment itself.
    gymnasium.register(
        GYM_ID,
        entry_point="lerobot_env_embodyrl.environment:SimulatorEnv",
        order_enforce=False,
        disable_env_checker=True,
    )
