"""LeRobot's processors in folders of pi0, pi0.5 and SmolVLA: supported steps, and steps that are rejected."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from test_vla_folders import edit_config
from test_vla_policy import ENV, build, folder_of

from embodyrl.errors import CheckpointError, ConfigError

PROMPT = {
    "smolvla": "smolvla_new_line_processor",
    "pi0": "pi0_new_line_processor",
    "pi05": "pi05_prepare_state_tokenizer_processor_step",
}
FEATURES = {
    "observation.state": {"type": "STATE", "shape": [5]},
    "observation.images.front": {"type": "VISUAL", "shape": [3, 20, 28]},
    "action": {"type": "ACTION", "shape": [7]},
}
BEFORE, AFTER = "policy_preprocessor", "policy_postprocessor"


def step(name, **config):
    return {"registry_name": name, "config": config}


def lerobot_folder(form, tmp_path):
    """Write a folder with the processors that LeRobot 0.4 writes for a model."""
    folder = folder_of(form, tmp_path, lerobot_statistics=True)
    flat = load_file(folder / f"{BEFORE}_step_5_normalizer_processor.safetensors")
    save_file(flat, folder / f"{AFTER}_step_0_unnormalizer_processor.safetensors")
    kind = "QUANTILES" if form == "pi05" else "MEAN_STD"
    modes = {"VISUAL": "IDENTITY", "STATE": kind, "ACTION": kind}
    scale = step("normalizer_processor", eps=1e-8, features=FEATURES, norm_map=modes)
    scale["state_file"] = f"{BEFORE}_step_5_normalizer_processor.safetensors"
    prompt = [step(PROMPT[form]), step("tokenizer_processor", max_length=300, task_key="task")]
    prompt = [scale, *prompt] if form == "pi05" else [*prompt, scale]
    before = [
        step("rename_observations_processor", rename_map={}),
        step("to_batch_processor"),
        *prompt,
        step("device_processor", device="cpu", float_dtype=None),
    ]
    back = step("unnormalizer_processor", eps=1e-8, features={"action": FEATURES["action"]}, norm_map=modes)
    back["state_file"] = f"{AFTER}_step_0_unnormalizer_processor.safetensors"
    for name, steps in ((BEFORE, before), (AFTER, [back, step("device_processor", device="cpu")])):
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "steps": steps}))
    return folder


def edit(folder, name, change):
    path = folder / f"{name}.json"
    content = json.loads(path.read_text())
    change(content["steps"])
    path.write_text(json.dumps(content))


def named(steps, name):
    return next(row for row in steps if row["registry_name"] == name)["config"]


@pytest.mark.parametrize("form", PROMPT)
def test_processors_of_lerobot_are_supported_and_saved(form, tmp_path):
    folder = lerobot_folder(form, tmp_path)
    policy = build(form, folder)
    policy.save(tmp_path / "saved")
    for name in (BEFORE, AFTER):
        assert (tmp_path / f"saved/{name}.json").read_bytes() == (folder / f"{name}.json").read_bytes()
    plain = build(form, folder_of(form, tmp_path / "plain", lerobot_statistics=True))
    values = np.linspace(-1, 1, 7, dtype=np.float32)
    assert np.array_equal(
        *(p.module.network.processor._normalizer.actions.unnormalize(values) for p in (policy, plain))
    )


@pytest.mark.parametrize(
    ("form", "name", "change", "says"),
    [
        ("smolvla", BEFORE, lambda s: s.insert(1, step("clip_processor")), "the step 'clip_processor'"),
        ("pi0", BEFORE, lambda s: s.insert(1, {"class": "my.Step"}), "the step 'my.Step'"),
        ("pi05", AFTER, lambda s: s.append(step("gripper_flip")), "the step 'gripper_flip'"),
        ("smolvla", BEFORE, lambda s: s.insert(1, step(PROMPT["pi05"])), "the step 'pi05_prepare"),
        (
            "smolvla",
            BEFORE,
            lambda s: named(s, "normalizer_processor")["norm_map"].update(STATE="MIN_MAX"),
            "'observation.state' by MIN_MAX",
        ),
        (
            "pi05",
            AFTER,
            lambda s: named(s, "unnormalizer_processor")["norm_map"].update(ACTION="MEAN_STD"),
            "'action' by MEAN_STD",
        ),
        (
            "pi0",
            BEFORE,
            lambda s: named(s, "normalizer_processor").update(normalize_observation_keys=[]),
            "'observation.state' by IDENTITY",
        ),
        (
            "pi0",
            BEFORE,
            lambda s: named(s, "rename_observations_processor").update(rename_map={"joints": "observation.state"}),
            "renames observations",
        ),
        (
            "smolvla",
            BEFORE,
            lambda s: named(s, "rename_observations_processor").update(
                rename_map={"observation.images.wrist": "observation.images.front"}
            ),
            "renames cameras .*Set model.cameras",
        ),
        ("pi05", BEFORE, lambda s: s.insert(1, s.pop(3)), "before it is normalized"),
        ("pi0", BEFORE, lambda s: named(s, "normalizer_processor").update(clip=True), "clip=true is not supported"),
        ("pi0", AFTER, lambda s: named(s, "device_processor").update(float_dtype="float16"), "float_dtype"),
        ("smolvla", BEFORE, lambda s: named(s, "tokenizer_processor").update(padding_side="left"), "padding_side"),
        ("smolvla", BEFORE, lambda s: s[1].update(overrides={"a": 1}), "overrides"),
        ("pi0", BEFORE, lambda s: named(s, "tokenizer_processor").update(task_key="plan"), "from 'plan'"),
    ],
)
def test_processors_that_behave_differently_are_rejected(form, name, change, says, tmp_path):
    folder = lerobot_folder(form, tmp_path)
    edit(folder, name, change)
    with pytest.raises(CheckpointError, match=rf"{name}\.json.* .*{says}.*model=lerobot"):
        build(form, folder)


def test_normalized_images_are_rejected(tmp_path):
    folder = lerobot_folder("smolvla", tmp_path)
    path = folder / f"{BEFORE}_step_5_normalizer_processor.safetensors"
    flat = load_file(path)
    save_file(flat | {"observation.images.front.mean": flat["action.mean"][:3].clone()}, path)
    build("smolvla", folder)
    edit(folder, BEFORE, lambda s: named(s, "normalizer_processor")["norm_map"].update(VISUAL="MEAN_STD"))
    with pytest.raises(CheckpointError, match=r"normalizes 'observation.images.front' by MEAN_STD"):
        build("smolvla", folder)


def test_different_statistics_of_the_postprocessor_are_rejected(tmp_path):
    folder = lerobot_folder("smolvla", tmp_path)
    path = folder / f"{AFTER}_step_0_unnormalizer_processor.safetensors"
    save_file({key: tensor + 1 for key, tensor in load_file(path).items()}, path)
    with pytest.raises(CheckpointError, match=r"different statistics of 'action'.*model=lerobot"):
        build("smolvla", folder)


def test_renamed_cameras_are_accepted_if_model_cameras_is_set(tmp_path):
    folder = lerobot_folder("smolvla", tmp_path)
    renamed = {"observation.images.wrist": "observation.images.front"}
    edit(folder, BEFORE, lambda s: named(s, "rename_observations_processor").update(rename_map=renamed))
    build("smolvla", folder, cameras=["front", "wrist"])


def test_tokenizer_step_sets_the_prompt_limit(tmp_path):
    folder = lerobot_folder("smolvla", tmp_path)
    env = replace(ENV, tasks=("a" * 60,) * 2)
    build("smolvla", folder, env=env)
    edit(folder, BEFORE, lambda s: named(s, "tokenizer_processor").update(max_length=48))
    with pytest.raises(ConfigError, match="supports 48"):
        build("smolvla", folder, env=env)


@pytest.mark.parametrize("name", ["relative_actions_processor", "delta_actions_processor"])
def test_relative_actions_need_equal_delta_dims(name, tmp_path):
    folder = lerobot_folder("pi0", tmp_path)
    joints = [*"abcdef", "gripper"]
    relative = step(name, enabled=False, exclude_joints=["gripper"], action_names=joints)
    edit(folder, BEFORE, lambda s: s.insert(2, relative))
    edit(folder, AFTER, lambda s: s.insert(1, step("absolute_actions_processor", enabled=False)))
    build("pi0", folder)
    edit(folder, BEFORE, lambda s: named(s, name).update(enabled=True))
    with pytest.raises(CheckpointError, match=r"policy_postprocessor\.json has enabled=False"):
        build("pi0", folder)
    edit(folder, AFTER, lambda s: named(s, "absolute_actions_processor").update(enabled=True))
    with pytest.raises(CheckpointError, match=r"6 relative action dimensions.*Set model.delta_dims=6"):
        build("pi0", folder)
    env = replace(ENV, state_dim=5)
    edit(folder, BEFORE, lambda s: named(s, name).update(action_names=["gripper", *"abcdef"]))
    with pytest.raises(CheckpointError, match="relative dimensions after absolute dimensions"):
        build("pi0", folder, env=env)


def test_cameras_in_another_order_are_rejected(tmp_path):
    folder = lerobot_folder("smolvla", tmp_path)
    for names, fits in ((["front", "wrist"], True), (["wrist", "front"], False), (["camera1", "camera2"], True)):
        images = {f"observation.images.{name}": FEATURES["observation.images.front"] for name in names}
        edit_config(folder, input_features=images)
        if fits:
            build("smolvla", folder)
            continue
        with pytest.raises(ConfigError, match=re.escape("camera_names=[wrist,front]")):
            build("smolvla", folder)
        build("smolvla", folder, cameras=["front", "wrist"])
