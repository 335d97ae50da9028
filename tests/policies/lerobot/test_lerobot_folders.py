"""LeRobot checkpoint folders: round trips, older layouts, new models and mismatches."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from golden_lerobot import (
    ACT,
    DIFFUSION,
    GOLDEN,
    env_of_config,
    folder_of,
    fresh,
    noise_for,
    observation,
    observe,
    policy_of,
    recorded,
    toy_env,
)
from safetensors.torch import load_file, save_file
from settings import model_of

from embodyrl.envs.history import with_chunks, with_history
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.policies.lerobot.act.config import ActConfig
from embodyrl.policies.lerobot.config import read_config
from embodyrl.policies.protocol import POLICIES
from embodyrl.types import ActionSpec

KINDS = ("act", "diffusion")


@pytest.mark.parametrize("case", [*ACT, *DIFFUSION])
def test_lerobot_folder_round_trips(case, tmp_path):
    folder = folder_of(case, tmp_path / "in")
    policy, out = policy_of(folder), tmp_path / "out"
    out.mkdir()
    policy.save(out)
    assert {p.name for p in out.iterdir()} == {p.name for p in folder.iterdir()}
    for path in folder.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("case", ["act/state", "diffusion/state"])
def test_changed_number_of_executed_actions_is_saved(case, tmp_path):
    folder = folder_of(case, tmp_path / "in")
    raw = json.loads((folder / "config.json").read_text())
    if raw.get("temporal_ensemble_coeff") is not None:  # which goes with single actions only
        (folder / "config.json").write_text(json.dumps(raw | {"temporal_ensemble_coeff": None}))
    policy, out = policy_of(folder, num_action_chunks=2), tmp_path / "out"
    out.mkdir()
    policy.save(out)
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, out))
    assert after == before | {"n_action_steps": 2}
    assert list(after) == list(before)
    assert f"executes {before['n_action_steps']} actions" in policy.spec.warnings[0]


def test_compiled_model_weights_keep_their_names(tmp_path):
    folder = folder_of("diffusion/state", tmp_path / "in")
    weights = load_file(folder / "model.safetensors")
    plain = policy_of(folder)
    save_file({k.replace("unet.", "unet._orig_mod."): t for k, t in weights.items()}, folder / "model.safetensors")
    policy, out = policy_of(folder), tmp_path / "out"
    obs = observation(policy._config, recorded("diffusion/state"), "raw.")
    assert np.array_equal(policy.act(obs, noise=None).actions, plain.act(obs, noise=None).actions)
    out.mkdir()
    policy.save(out)
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("robot", ["", "so100"])
def test_statistics_in_older_weight_files_are_used_and_kept(robot, tmp_path):
    folder, data = folder_of("act/state", tmp_path / "in"), recorded("act/state")
    statistics = load_file(folder / "policy_preprocessor_step_3_normalizer_processor.safetensors")
    for path in folder.glob("policy_*"):
        path.unlink()
    weights = load_file(folder / "model.safetensors")
    for name, tensor in statistics.items():
        feature, _, number = name.rpartition(".")
        if number in ("mean", "std"):
            old = f"normalize_inputs.buffer_{feature.replace('.', '_')}.{number}"
            weights[f"{robot}.buffer.{name}" if robot else old] = tensor.contiguous()
            if robot:
                weights[f"aloha.buffer.{name}"] = tensor + 1
    save_file(weights, folder / "model.safetensors")
    if robot:
        with pytest.raises(CheckpointError, match="data sets or robots"):
            policy_of(folder)
        one_robot = {key: tensor for key, tensor in weights.items() if not key.startswith("aloha.")}
        save_file(one_robot, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"No statistics 'so10'.*'so100'"):
            policy_of(folder, unnorm_key="so10")
        save_file(weights, folder / "model.safetensors")
    policy = policy_of(folder, unnorm_key=robot or None)
    whole = policy._to_actions(
        policy._compute_greedy_actions(None, policy._encode(observation(policy._config, data, "raw."))).detach()
    )
    assert np.abs(whole - data["eval.chunk_unnormalised"].numpy()[:, :1]).max() < 1e-4
    (tmp_path / "out").mkdir()
    policy.save(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_lerobot_keys_without_effect_give_a_warning(tmp_path):
    words = ["env=tabletop", "model=act", "model.temporal_ensemble=true", "model.action_std=0.3"]
    (line,) = load_config("eval", words).warnings
    assert line.startswith("model.action_std has no effect")
    folder, env = fresh("diffusion", tmp_path / "in", noise_scheduler_type="DDPM"), toy_env(4)
    (line,) = policy_of(folder, env=env, diffusion_eta=0.5).spec.warnings
    assert line.startswith("model.diffusion_eta=0.5 has no effect with the sampler DDPM")
    for keys in ({}, {"diffusion_eta": 0.5, "sampler": "DDIM"}):
        assert policy_of(folder, env=env, **keys).spec.warnings == ()


def test_checkpoint_without_state_ignores_the_state_of_the_environment(tmp_path):
    features = {
        "input_features": {"observation.images.front": {"type": "VISUAL", "shape": [3, 32, 40]}},
        "output_features": {"action": {"type": "ACTION", "shape": [2]}},
    }
    folder = fresh("act", tmp_path / "in", **features)
    blind, sighted = (toy_env(state, ("front",)) for state in (0, 5))
    assert policy_of(folder, env=sighted).spec.inputs.state is False
    first, second = (policy_of(folder, env=env).act(observe(env, 2), noise=None).actions for env in (blind, sighted))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("lost", ["policy_*", "policy_preprocessor*"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_without_statistics_are_rejected(kind, lost, tmp_path):
    folder = folder_of(f"{kind}/state", tmp_path / "in")
    for path in folder.glob(lost):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no statistics of states and actions.*Download the processor files"):
        policy_of(folder)


@pytest.mark.parametrize("cameras", [(), ("front",)])
@pytest.mark.parametrize("kind", KINDS)
def test_new_model_is_saved_in_the_lerobot_layout(kind, cameras, tmp_path):
    """Files as in folders written by LeRobot, without the keys of its training; statistics and RL heads round-trip."""
    env = toy_env(4, cameras)
    start = fresh(kind, tmp_path / "start")
    row = {
        name: [value] * 4 for name, value in {"mean": 0.5, "std": 2, "min": -3, "max": 4, "q01": -2, "q99": 3}.items()
    }
    action = {name: values[:2] for name, values in row.items()}
    (start / "dataset_statistics.json").write_text(json.dumps({"toy": {"action": action, "proprio": row}}))
    policy, out = policy_of(start, env=env, value_dim=1), tmp_path / "out"
    out.mkdir()
    policy.save(out)
    theirs = GOLDEN / kind / "state" / "policy"
    keys, wanted = ({*json.loads((folder / "config.json").read_text())} for folder in (out, theirs))
    assert keys <= wanted
    assert {key.partition("_")[0] for key in wanted - keys} == (
        {"optimizer"} if kind == "act" else {"optimizer", "scheduler", "compile", "drop"}
    )
    assert {p.name for p in out.iterdir()} == {p.name for p in theirs.iterdir()} | {"embodyrl_heads.safetensors"}
    back = policy_of(out, env=env, value_dim=1, seed=5)
    obs, noise = observe(env, 3), noise_for(policy, 3)
    one, other = (p.act(obs, noise=noise) for p in (policy, back))
    assert np.array_equal(one.actions, other.actions)
    assert np.array_equal(one.value, other.value)
    low, high = policy._to_actions(torch.tensor([[[-1.0, -1]], [[1, 1]]]))[:, 0]
    assert (low.tolist(), high.tolist()) == (([-1.5] * 2, [2.5] * 2) if kind == "act" else ([-3.0] * 2, [4.0] * 2))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_a_run_include_their_statistics(kind, tmp_path):
    env = toy_env(4)
    start = fresh(kind, tmp_path / "start")
    policy, out = policy_of(start, env=env), tmp_path / "out"
    row = {
        name: [value] * 4 for name, value in {"mean": 0.5, "std": 2, "min": -3, "max": 4, "q01": -2, "q99": 3}.items()
    }
    entry = {"toy": {"action": {name: values[:2] for name, values in row.items()}, "proprio": row}}
    (start / "dataset_statistics.json").write_text(json.dumps(entry))
    trained = policy_of(start, env=env)
    out.mkdir()
    trained.save(out)
    policy.load_weights(out)
    obs = observe(env, 2)
    assert np.array_equal(policy.act(obs, noise=None).actions, trained.act(obs, noise=None).actions)


def test_history_keeps_whole_cameras_of_the_environment(tmp_path):
    """With a history, the environment's spec also contains names such as front_1, which are no cameras to render."""
    features = {
        "input_features": {
            "observation.images.camera": {"type": "VISUAL", "shape": [3, 112, 112]},
            "observation.state": {"type": "STATE", "shape": [4]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [7]}},
    }
    folder = fresh("diffusion", tmp_path / "in", n_obs_steps=2, **features)
    words = ("env=tabletop", "env.history=2", "env.init_params.camera_names=[front,wrist]")
    model = ("model=diffusion", f"model.path={folder}", "model.num_action_chunks=4")
    plan = build_run_plan(load_config("eval", [*words, *model]), training=False)
    assert plan.env_settings.init_params.camera_names == ["front"]
    assert plan.env.cameras.names == ("front_1", "front")


@pytest.mark.parametrize("kind", KINDS)
def test_contradictory_lerobot_settings_are_reported(kind, tmp_path):
    factory = POLICIES.get(kind)

    def problem(**changes):
        folder = folder_of(f"{kind}/state", tmp_path / str(len(list(tmp_path.iterdir()))))
        raw = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(raw))
        return factory.validate(model_of(kind, path=str(folder), num_action_chunks=1))[0]

    assert "set model=" in problem(type="act" if kind == "diffusion" else "diffusion").replace("Set", "set")
    assert "output_features" in problem(output_features={})
    assert "vision_backbone" in problem(vision_backbone="vgg")
    folder = folder_of(f"{kind}/state", tmp_path / "whole")
    found = factory.validate(model_of(kind, path=str(folder), num_action_chunks=99))
    assert "model.num_action_chunks=99" in found[0]
    (folder / "model.safetensors").unlink()
    assert "download the weights" in factory.validate(model_of(kind, path=str(folder), num_action_chunks=1))[0]
    assert "is not a folder" in factory.validate(model_of(kind, path=str(tmp_path / "none")))[0]


def test_mismatched_environment_is_rejected(tmp_path):
    folder = folder_of("diffusion/state", tmp_path / "in")
    cfg, factory = model_of("diffusion", path=str(folder), num_action_chunks=3), POLICIES.get("diffusion")
    config = read_config(folder, "diffusion", factory.config)
    assert factory.spec(cfg, env_of_config(config), 0).inputs.state
    one_step = env_of_config(config, state_dim=10)
    with pytest.raises(ConfigError, match=r"for each of 3 steps.*env.history=3.*data.history=3"):
        factory.spec(cfg, one_step, 0)
    assert factory.spec(cfg, with_history(one_step, 3), 0).inputs.state
    with pytest.raises(ConfigError, match="has 4-D actions"):
        factory.spec(cfg, env_of_config(config, action=ActionSpec(dim=4)), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_mismatch_error_lists_state_and_image_sizes(kind, tmp_path):
    """Not by the features of config.json."""
    start = fresh(kind, tmp_path / "in")
    cfg = model_of(kind, path=str(start), num_action_chunks=4)
    (out := tmp_path / "out").mkdir()
    policy_of(start, env=toy_env(5, ("front",), (32, 40)), num_action_chunks=4).save(out)
    with pytest.raises(CheckpointError) as raised:
        POLICIES.get(kind).compare(cfg, toy_env(4, ("front",), (48, 48)), out)
    assert "a state of 4 numbers, but the checkpoint needs 5" in str(raised.value)
    assert "images of 48x48, but the checkpoint needs 32x40" in str(raised.value)
    assert "VISUAL" not in str(raised.value)


def test_cameras_are_not_mistaken_for_history_frames(tmp_path):
    factory, env = POLICIES.get("diffusion"), toy_env(4, ("front", "wrist"))
    cfg = model_of("diffusion", path=str(fresh("diffusion", tmp_path / "in", n_obs_steps=2)), num_action_chunks=4)
    with pytest.raises(ConfigError, match="for each of 2 steps"):
        factory.spec(cfg, env, 0)
    assert factory.spec(cfg, with_history(env, 2), 0).inputs.num_images == 4


def test_temporal_ensemble_policy_returns_whole_chunks(tmp_path):
    folder, data = folder_of("act/state", tmp_path / "in"), recorded("act/state")
    config = read_config(folder, "act", ActConfig)
    env = with_chunks(env_of_config(config), config.chunk_size)
    policy = policy_of(folder, env=env, temporal_ensemble=True)
    out = policy.act(observation(config, data, "raw."), noise=None)
    expected = data["eval.chunk_unnormalised"].numpy()
    assert out.actions.shape == (3, 1, 18)
    assert np.abs(out.actions.reshape(expected.shape) - expected).max() < 1e-4
    drawn = policy.act(observation(config, data, "raw."), noise=noise_for(policy, 3))
    assert np.array_equal(drawn.actions, out.actions), "an average of chunks has no noise"
    assert "averaged" in policy.spec.untrainable
    assert "env.ensemble_chunk=6 env.ensemble_coeff=0.01" in policy_of(folder).spec.warnings[0]
    with pytest.raises(ConfigError, match="ensemble_chunk=6"):
        policy_of(folder, temporal_ensemble=True, env=env_of_config(config, action=ActionSpec(dim=4)))


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_lerobot_folders_are_reported(kind, tmp_path):
    folder = folder_of(f"{kind}/state", tmp_path / "in")
    weights = load_file(folder / "model.safetensors")
    key = next(iter(weights))
    save_file({k: t for k, t in weights.items() if k != key}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="lacks 1 of"):
        policy_of(folder)
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        policy_of(folder)
    folder = folder_of(f"{kind}/state", tmp_path / "other")
    (folder / "policy_preprocessor_step_3_normalizer_processor.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="policy_preprocessor"):
        policy_of(folder)


def _edited(folder, name, edit):
    path = folder / name
    content = json.loads(path.read_text())
    edit(content["steps"])
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [
        ("policy_preprocessor.json", lambda s: s.insert(0, {"registry_name": "delta_actions"}), "'delta_actions'"),
        ("policy_preprocessor.json", lambda s: s.insert(0, {"class": "my.Step"}), "'my.Step'"),
        ("policy_preprocessor.json", lambda s: s[3]["config"]["norm_map"].update(STATE="MEAN_STD"), "by MEAN_STD"),
        ("policy_postprocessor.json", lambda s: s[0]["config"]["norm_map"].pop("ACTION"), "'action' by IDENTITY"),
        (
            "policy_preprocessor.json",
            lambda s: s[3]["config"].update(normalize_observation_keys=[]),
            "'observation.state' by IDENTITY",
        ),
        (
            "policy_preprocessor.json",
            lambda s: s[0]["config"].update(rename_map={"joints": "observation.state"}),
            "renames observations",
        ),
    ],
)
def test_processors_that_behave_differently_are_rejected(name, edit, says, tmp_path):
    folder = folder_of("diffusion/state", tmp_path / "in")
    _edited(folder, name, edit)
    with pytest.raises(CheckpointError, match=rf"{name} .*{says}.*model=lerobot"):
        policy_of(folder)


def test_different_action_statistics_of_the_processors_are_rejected(tmp_path):
    folder = folder_of("act/state", tmp_path / "in")
    path = folder / "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
    save_file({key: tensor + 1 for key, tensor in load_file(path).items()}, path)
    with pytest.raises(CheckpointError, match="different statistics of 'action'"):
        policy_of(folder)


def test_processors_without_statistics_leave_values_unchanged(tmp_path):
    """LeRobot writes no file of statistics without statistics, and leaves the values unchanged."""
    folder = folder_of("act/state", tmp_path / "in")
    for name, step in (("policy_preprocessor", 3), ("policy_postprocessor", 0)):
        _edited(folder, f"{name}.json", lambda steps, step=step: steps[step].pop("state_file"))
    for path in folder.glob("policy_*.safetensors"):
        path.unlink()
    policy, actions = policy_of(folder), np.ones((1, 6, 3), np.float32)
    assert np.abs(policy._from_actions(actions).numpy() - actions).max() < 1e-6


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"horizon": 6}, "horizon=6 is not a multiple"),
        ({"kernel_size": 4}, "kernel_size=4 is even"),
        ({"diffusion_step_embed_dim": 7}, "diffusion_step_embed_dim=7 is odd"),
        ({"down_dims": [12, 24], "n_groups": 4}, "a multiple of 8"),
    ],
)
def test_sizes_that_lerobot_cannot_build_are_rejected(changes, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        policy_of(fresh("diffusion", tmp_path / "in", **changes), env=toy_env())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("key", "value"),
    [("use_peft", True), ("temporal_agg", True), ("image_resize_mode", "letterbox"), ("proprio_dropout", 0.1)],
)
def test_error_names_the_unknown_field_of_config_json(kind, key, value, tmp_path):
    folder = folder_of(f"{kind}/state", tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(CheckpointError, match=f"{key}=.* is not supported"):
        policy_of(folder)
    (folder / "config.json").write_text(json.dumps(config | {key: None, "gradient_checkpointing": True}))
    policy_of(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_policy_clips_states_to_the_same_range(kind, tmp_path):
    """States beyond the data are clipped, in a saved folder too; folders of LeRobot have no range."""
    env = toy_env(4, ())
    start = fresh(kind, tmp_path / "start")
    row = {"mean": 0.5, "std": 1e-3, "min": 0.0, "max": 1.0, "q01": 0.4, "q99": 0.6}
    part = {name: [value] * 4 for name, value in row.items()}
    action = {name: values[:2] for name, values in part.items()}
    (start / "dataset_statistics.json").write_text(json.dumps({"toy": {"action": action, "proprio": part}}))
    policy, out = policy_of(start, env=env), tmp_path / "out"
    out.mkdir()
    policy.save(out)
    for units in (policy._normalizer, policy_of(out, env=env)._normalizer):
        read = [units.normalize("observation.state", torch.full((2,), value)) for value in (1.5, 50.0, -50.0, -0.5)]
        assert torch.equal(read[0], read[1])
        assert torch.equal(read[2], read[3])
    plain = policy_of(folder_of(f"{kind}/state", tmp_path / "plain"))
    states = torch.full((plain._config.state_dim,), 1e6)
    assert plain._normalizer.normalize("observation.state", states).abs().min() > 1e4
