"""Poses of grippers and inverse kinematics, on a small arm with six hinges."""

import importlib
from types import ModuleType

import numpy as np
import pytest

from embodyrl.envs.mujoco_rendering import select_headless_backend

_AXES = ("0 0 1", "0 1 0", "0 1 0", "1 0 0", "0 1 0", "1 0 0")
_HALF = np.pi / 2


def six_hinges() -> str:
    """Return the MJCF model of an arm whose links are 0.2 m long and point along x."""
    links = "".join(
        f'<body name="link{index}" pos="{0.2 if index else 0} 0 0"><joint name="joint{index}" axis="{axis}" '
        'limited="true" range="-2 2"/><geom type="sphere" size="0.01"/>'
        for index, axis in enumerate(_AXES)
    )
    return f'<mujoco><compiler angle="radian"/><worldbody>{links}{"</body>" * len(_AXES)}</worldbody></mujoco>'


@pytest.fixture
def kinematics() -> ModuleType:
    select_headless_backend()  # before mujoco, which reads the choice when it is imported
    pytest.importorskip("mujoco")
    return importlib.import_module("embodyrl.envs.robots.kinematics")


@pytest.fixture
def arm(kinematics: ModuleType):
    import mujoco

    model = mujoco.MjModel.from_xml_string(six_hinges())
    return kinematics.Arm(model, "link5", [f"joint{index}" for index in range(6)], 0.1), mujoco.MjData(model)


def test_straight_arm_reaches_its_full_length_along_x(arm):
    arm, data = arm
    pose = arm.compute_pose(data)
    np.testing.assert_allclose(pose.position, [1.1, 0, 0], atol=1e-12)
    np.testing.assert_allclose(pose.rotation, np.eye(3), atol=1e-12)


def test_solved_joint_angles_reach_the_pose(arm):
    arm, data = arm
    rng = np.random.default_rng(0)
    for _ in range(10):
        start = np.array([0.0, -0.9, 1.1, 0.2, -0.8, 0.1])
        data.qpos[:] = start + rng.uniform(-0.2, 0.2, 6)
        goal = arm.compute_pose(data)
        data.qpos[:] = start
        data.qpos[:] = arm.solve_joint_angles(data, goal)
        assert arm.compute_pose(data).is_near(goal, 1e-3, 1e-3)


def test_solved_joint_angles_respect_the_limits(kinematics, arm):
    arm, data = arm
    angles = arm.solve_joint_angles(
        data, kinematics.Pose(np.array([-1.1, 0.0, 0.0]), kinematics.rotation_matrix((0, 0, 1), np.pi))
    )
    assert np.abs(angles).max() <= 2


def test_rotations_match_hand_made_matrices(kinematics):
    rotation_matrix, rotation_between = kinematics.rotation_matrix, kinematics.rotation_between
    quarter = rotation_matrix((0, 0, 2), _HALF)
    np.testing.assert_allclose(quarter, [[0, -1, 0], [1, 0, 0], [0, 0, 1]], atol=1e-12)
    np.testing.assert_allclose(rotation_between(np.eye(3), quarter), [0, 0, _HALF], atol=1e-12)
    np.testing.assert_allclose(rotation_between(quarter, np.eye(3)), [0, 0, -_HALF], atol=1e-12)


def test_step_towards_a_pose_is_limited_in_distance_and_angle(kinematics):
    Pose, rotation_matrix = kinematics.Pose, kinematics.rotation_matrix
    start = Pose(np.zeros(3), np.eye(3))
    goal = Pose(np.array([0.0, 2.0, 0.0]), rotation_matrix((0, 0, 1), _HALF))
    way = start.move_towards(goal, 0.5, 0.1)
    np.testing.assert_allclose(way.position, [0, 0.5, 0], atol=1e-12)
    np.testing.assert_allclose(kinematics.rotation_between(start.rotation, way.rotation), [0, 0, 0.1], atol=1e-12)
    assert start.move_towards(goal, 3, 3).is_near(goal, 1e-9, 1e-6)
    assert not way.is_near(goal, 1.6, 1.0)
    assert not way.is_near(goal, 1.4, 2.0)
