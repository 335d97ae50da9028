"""The description of a ManiSkill arm for tests without the simulator."""

from embodyrl.envs.maniskill.install import Description

PANDA = Description(
    control_mode="pd_ee_delta_pose",
    action_low=(-1.0,) * 7,
    action_high=(1.0,) * 7,
    has_gripper=True,
    state_dim=16,
    cameras=("base_camera", "hand_camera"),
    max_episode_steps=50,
)
"""Properties of PickCube-v1 and PushCube-v1 in ManiSkill."""
