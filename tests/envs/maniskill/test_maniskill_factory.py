"""ManiSkill's config checks without a simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from panda import PANDA
from settings import env_of

from embodyrl.envs.maniskill import factory as described
from embodyrl.envs.maniskill import install
from embodyrl.envs.maniskill.factory import FACTORY
from embodyrl.envs.maniskill.settings import ObsMode, SimBackend, get_instruction
from embodyrl.envs.settings import InitParams
from embodyrl.errors import ConfigError, MissingDependencyError
from embodyrl.plan.config import load_config


def config(**changes):
    cameras = InitParams(camera_heights=96, camera_widths=128, camera_names=["base_camera"])
    return env_of(**{"env_type": "maniskill", "id": "PushCube-v1", "init_params": cameras, **changes})


def test_preset_is_valid_and_separates_train_and_eval_seeds():
    cfg = load_config("train", ["env=maniskill", "env.id=PushCube-v1"]).env
    assert FACTORY.validate(cfg) == []
    assert cfg.train.state_ids is not None
    assert cfg.eval.state_ids is not None
    assert cfg.train.state_ids[1] < cfg.eval.state_ids[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": None}, "env.id is not set"),
        ({"kwargs": {"control_mode": "pd_joint_pos"}}, "is reserved. Set it with env.control_mode"),
        ({"kwargs": {"sensor_configs": {"width": 64}}}, "env.kwargs.sensor_configs.width: set env.init_params"),
        ({"kwargs": {"sensor_configs": {"base_camera": {"height": 64}}}}, "sensor_configs.base_camera.height: set"),
        ({"init_params": InitParams(camera_names=["base_camera", "base_camera"])}, "contains a camera twice"),
    ],
)
def test_config_problems_are_reported_without_importing_the_simulator(changes, words):
    (line,) = FACTORY.validate(config(**changes))
    assert words in line


def test_missing_camera_error_suggests_a_name():
    cfg = config(init_params=InitParams(camera_names=["bse_camera"]))
    with pytest.raises(ConfigError, match=r"no camera 'bse_camera'\. Did you mean 'base_camera'\?"):
        described._build_spec(cfg, PANDA)


def test_images_and_states_are_declared_by_the_observation_mode():
    rgb, state = (described._build_spec(config(obs_mode=mode), PANDA) for mode in (ObsMode.rgb, ObsMode.state))
    assert (rgb.cameras.names, rgb.cameras.size, state.cameras.names, state.cameras.size) == (
        ("base_camera",),
        (96, 128),
        (),
        (0, 0),
    )
    assert (rgb.benchmark.unnorm_key, rgb.expert.tasks, rgb.num_reset_ids) == ("maniskill", (0,), 100_000)
    assert described._build_spec(config(), replace(PANDA, control_mode="pd_joint_pos")).expert.tasks == ()
    assert rgb.action.gripper is not None
    assert (rgb.action.gripper.open, rgb.action.gripper.closed) == (1.0, -1.0)


def test_placements_of_the_bridge_tasks_are_numbered():
    spec = described._build_spec(config(id="PutEggplantInBasketScene-v1"), PANDA)
    assert (spec.num_reset_ids, spec.benchmark.unnorm_key, spec.expert.tasks) == (64, "bridge_orig", ())


def test_bridge_preset_is_valid():
    cfg = load_config("train", ["env=maniskill_bridge"]).env
    assert FACTORY.validate(cfg) == []
    spec = described._build_spec(cfg, replace(PANDA, cameras=("3rd_view_camera",)))
    assert (spec.tasks, spec.num_reset_ids, spec.cameras.names) == (("put carrot on plate",), 24, ("3rd_view_camera",))


def test_every_task_has_an_instruction():
    assert (
        get_instruction("StackGreenCubeOnYellowCubeBakedTexInScene-v1") == "stack the green block on the yellow block"
    )
    assert get_instruction("PushCube-v1") == "push the blue cube to the target"
    assert get_instruction("RotateValveLevel0-v1") == "rotate valve level0"
    assert get_instruction("MS-CartpoleBalance-v1") == "ms cartpole balance"


def test_gpu_batch_is_rejected_for_tasks_with_randomly_chosen_objects():
    batch = config(id="PegInsertionSide-v1", sim_backend=SimBackend.gpu)
    with pytest.raises(ConfigError, match="samples objects only when its scene is built"):
        described._build_spec(batch, replace(PANDA, samples_scene=True))
    spec = described._build_spec(batch, PANDA)
    assert (spec.simulator.lockstep, spec.simulator.on_gpu) == (True, True)
    assert described._build_spec(config(), PANDA).simulator.on_gpu is False
    (line,) = FACTORY.validate(config(id="PutCarrotOnPlateInScene-v1", sim_backend=SimBackend.gpu))
    assert "steps the whole batch until objects settle" in line


SAPIEN = """
class Device:
    def __init__(self, name): self.name = name
class render:
    def RenderSystem(device): assert device.name == "cpu", "cannot find a suitable rendering device"
class physx:
    def version(): return "105.1"
    def enable_gpu(): {enable}
"""


@pytest.mark.parametrize(
    ("enable", "says"),
    [
        ("pass", None),
        ("raise OSError('libcuda.so: cannot open')", r"libcuda\.so: cannot open.*copy .*105\.1/libPhysXGpu_64\.so"),
    ],
    ids=["fetched", "offline"],
)
def test_gpu_physx_is_downloaded_before_a_task_is_built(enable, says, tmp_path, monkeypatch, capfd):
    (tmp_path / "sapien.py").write_text(SAPIEN.format(enable=enable))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    if says:
        with pytest.raises(MissingDependencyError, match=says):
            install.download_physx()
    else:
        install.download_physx()
    assert f"{tmp_path}/.sapien/physx/105.1" in capfd.readouterr().err


def test_gpu_renderer_is_probed_on_gpu_machines(tmp_path, monkeypatch):
    """The software driver serves the CPU even if the GPU's driver is broken."""
    (tmp_path / "sapien.py").write_text(SAPIEN.format(enable="pass"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(install.metadata, "version", lambda name: "3.0.3")
    for gpus, level in (("", "ok"), ("0", "warn")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        finding = install.probe_vulkan()
        assert (finding.level, "libxext6" in finding.fix) == (level, level == "warn")
