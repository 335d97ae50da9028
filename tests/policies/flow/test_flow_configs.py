"""Model sizes from config.json of openpi, lerobot, transformers and embodyrl."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
from golden_flow import NAMES, spec_of
from tiny_vla import own_config, write_checkpoint
from transformers import PI0Config

from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies import POLICIES
from embodyrl.policies.flow.specs import GEMMA_300M, PI0, PI05, SMOLVLA, read_spec
from embodyrl.policies.flow.vla.folder import find_warnings, read_normalizer, read_side_files

OPENPI = {
    "action_dim": 32,
    "action_horizon": 50,
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "precision": "bfloat16",
}
LEROBOT = {
    "type": "pi0",
    "chunk_size": 50,
    "max_action_dim": 32,
    "max_state_dim": 32,
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
}
SMOL = {
    "type": "smolvla",
    "chunk_size": 50,
    "max_action_dim": 32,
    "max_state_dim": 32,
    "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
    "num_vlm_layers": 16,
    "num_expert_layers": 0,
    "expert_width_multiplier": 0.75,
    "self_attn_every_n_layers": 2,
    "attention_mode": "cross_attn",
    "add_image_special_tokens": False,
}


@pytest.fixture
def read(tmp_path):
    def reader(config, **options):
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return read_spec(tmp_path, **options)

    return reader


def test_published_configs_are_read(read):
    assert read(OPENPI) == read(LEROBOT) == PI0
    assert read(OPENPI, adaptive=True) == read(LEROBOT | {"type": "pi05"}) == PI05
    assert read(OPENPI | {"action_horizon": 10}, adaptive=True) == replace(PI05, horizon=10)
    assert read(OPENPI | {"paligemma_variant": "gemma_300m"}).language == GEMMA_300M
    assert read(SMOL) == SMOLVLA


BASE = {
    **{"n_obs_steps": 1, "n_action_steps": 50, "device": "cuda", "use_amp": False, "use_peft": False, "license": None},
    **{"push_to_hub": True, "repo_id": "a/b", "private": None, "tags": ["x"], "pretrained_path": "lerobot/base"},
    **{"input_features": {}, "output_features": {}, "normalization_mapping": {"VISUAL": "IDENTITY"}},
    **{"empty_cameras": 1, "tokenizer_max_length": 48, "min_period": 0.004, "max_period": 4.0, "rtc_config": None},
    **{"compile_model": True, "compile_mode": "max-autotune", "gradient_checkpointing": True},
    **{"freeze_vision_encoder": True, "train_expert_only": True, "optimizer_lr": 1e-4, "optimizer_betas": [0.9, 0.95]},
    **{"scheduler_warmup_steps": 1000, "scheduler_decay_lr": 2.5e-6, "a_later_key": False},
}
FULL_SMOL = BASE | {
    **{"resize_imgs_with_padding": [512, 512], "adapt_to_pi_aloha": False, "use_delta_joint_actions_aloha": False},
    **{"num_steps": 10, "use_cache": True, "train_state_proj": True, "load_vlm_weights": True, "prefix_length": 0},
    "pad_language_to": "max_length",
}
FULL_PI = BASE | {
    **{"dtype": "bfloat16", "num_inference_steps": 10, "time_sampling_beta_alpha": 1.5, "time_sampling_scale": 0.999},
    **{"image_resolution": [224, 224], "use_relative_actions": False, "relative_exclude_joints": ["gripper"]},
}


def test_all_fields_of_published_configs_are_accepted(read):
    assert read(SMOL | FULL_SMOL) == SMOLVLA
    assert read(SMOL | {"vlm_model_name": "/weights/SmolVLM2-500M-Video-Instruct/"}) == SMOLVLA
    assert read(LEROBOT | FULL_PI) == PI0
    assert read(LEROBOT | FULL_PI | {"type": "pi05"}) == PI05
    assert read(OPENPI | {"pi05": True, "max_token_len": 200, "discrete_state_input": True}) == PI05


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        *((SMOL, key, True) for key in ("adapt_to_pi_aloha", "use_delta_joint_actions_aloha", "use_peft", "new_key")),
        *((SMOL, "resize_imgs_with_padding", value) for value in (None, [224, 224])),
        *((config, "min_period", 1e-2) for config in (SMOL, LEROBOT, OPENPI)),
        *((config, "max_period", 8.0) for config in (SMOL, LEROBOT, OPENPI)),
        *((config, "n_obs_steps", 2) for config in (SMOL, LEROBOT)),
        (LEROBOT, "image_resolution", [448, 448]),
        (LEROBOT, "adapt_to_pi_aloha", True),
        (LEROBOT, "type", "pi0_fast"),
        (LEROBOT, "rtc_config", {"enabled": True}),
        (OPENPI, "image_keys", ["base_0_rgb"]),
    ],
)
def test_error_names_the_unsupported_config_value(config, key, value, read):
    with pytest.raises(CheckpointError, match=f"{key}=.* is not supported"):
        read(config | {key: value})


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("", "max_period", 8.0),
        ("vlm_config", "projector_hidden_act", "gelu"),
        ("text_config", "rope_parameters", {"rope_theta": 1e6, "rope_type": "default"}),
        ("text_config", "hidden_act", "silu"),
        ("text_config", "attention_bias", True),
        ("vision_config", "num_channels", 4),
        ("dit_config", "final_logit_softcapping", 30.0),
    ],
)
def test_error_names_the_unsupported_transformers_field(part, key, value, tmp_path):
    config = json.loads(PI0Config().to_json_string(use_diff=False))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(tmp_path) == PI0
    vlm = config["vlm_config"]
    {"": config, "vlm_config": vlm, "dit_config": config["dit_config"]}.get(part, vlm.get(part))[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{key}=.* is not supported"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("form", "told", "keys", "match"),
    [
        ("smolvla", {"num_steps": 4}, {}, r"uses 4 denoising steps \(num_steps\), but model\.num_steps=10"),
        ("pi0", {"num_inference_steps": 5}, {}, r"uses 5 denoising steps .*model\.num_steps=10"),
        ("pi0", {"num_inference_steps": 5}, {"num_steps": 5}, None),
        ("smolvla", {"n_action_steps": 50}, {}, "executes 50 actions per query"),
    ],
)
def test_other_sampling_settings_give_a_warning(form, told, keys, match, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(told))
    values = {"model_type": form, "num_action_chunks": 3} | keys
    found = find_warnings(tmp_path, POLICIES.get(form).settings.model_validate(values))
    assert re.search(match, found[0]) if match else found == ()


def test_smaller_smolvla_config_is_read(read):
    spec = read(SMOL | {"num_vlm_layers": 8, "expert_width_multiplier": 0.5, "self_attn_every_n_layers": 1})
    assert (spec.language.depth, spec.expert.depth, spec.expert.width, spec.joint_every) == (8, 8, 480, 1)
    assert spec.expert.mlp == 1280  # 4 * 320


@pytest.mark.parametrize("name", NAMES)
def test_flow_config_round_trips(name, read):
    spec = spec_of(name)
    assert read(own_config(spec)) == spec
    with pytest.raises(CheckpointError, match="malformed"):
        read({"embodyrl_flow": own_config(spec)["embodyrl_flow"] | {"wrong": 1}})


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (OPENPI | {"paligemma_variant": "gemma_7b"}, "paligemma_variant=gemma_7b is not a known Gemma size"),
        (SMOL | {"attention_mode": "self_attn"}, "attention_mode.*not supported"),
        (SMOL | {"num_expert_layers": 8}, "num_expert_layers.*not supported"),
        (SMOL | {"self_attn_every_n_layers": 0}, "self_attn_every_n_layers.*not supported"),
        (SMOL | {"vlm_model_name": "HuggingFaceTB/SmolVLM2-2.2B-Instruct"}, "2.2B.*not supported"),
        ({"type": "pi0"}, "malformed"),
        ("{", "malformed"),
        ("[]", "malformed"),
    ],
    ids=["variant", "attention", "experts", "joint layers", "backbone", "fields", "json", "list"],
)
def test_other_architectures_and_damaged_files_are_rejected(config, match, read):
    with pytest.raises(CheckpointError, match=match):
        read(config)


def test_missing_config_file_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="missing or malformed"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("form", "told", "keys", "match"),
    [
        ("pi05", {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}, {}, "set model.normalization=mean_std"),
        ("pi05", {"STATE": "MEAN_STD", "ACTION": "QUANTILES"}, {}, "MEAN_STD and QUANTILES"),
        ("pi05", {"STATE": "MEAN_STD", "ACTION": "QUANTILES"}, {"state_in_prompt": False}, None),
        ("pi05", {"discrete_state_input": False}, {}, "set model.state_in_prompt=false"),
        ("pi05", {"discrete_state_input": False}, {"state_in_prompt": False}, None),
        ("smolvla", {"STATE": "MIN_MAX", "ACTION": "MIN_MAX"}, {}, "only mean_std, quantiles are supported"),
        ("smolvla", {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}, {}, None),
        ("pi0", {"use_relative_actions": True}, {}, "relative to the state .use_relative_actions."),
        ("pi0", {"use_relative_actions": True}, {"delta_dims": 6}, None),
    ],
)
def test_lerobot_units_must_match_the_settings(form, told, keys, match, tmp_path):
    """Wrong units would not be detected: actions have the right size and another meaning."""
    folder = write_checkpoint(tmp_path / form, form, state_dim=8, action_dim=7)
    config = json.loads((folder / "config.json").read_text())
    told = {"normalization_mapping": told} if "ACTION" in told else told
    (folder / "config.json").write_text(json.dumps(config | told))
    factory = POLICIES.get(form)
    cfg = factory.settings.model_validate({"model_type": form, "path": str(folder), "num_action_chunks": 3} | keys)
    with nullcontext() if match is None else pytest.raises(ConfigError, match=match):
        read_normalizer(folder, cfg, 8, 7)
    if "normalization_mapping" in told:
        numbers = {name: [float(i)] * 8 for i, name in enumerate(("q01", "min", "mean", "std", "max", "q99"))}
        entry = {"action": {name: row[:7] for name, row in numbers.items()}, "proprio": numbers}
        (folder / "dataset_statistics.json").write_text(json.dumps({"data": entry}))
        read_normalizer(folder, cfg, 8, 7)
        config = json.loads(read_side_files(folder, cfg)["config.json"])
        read = {"ACTION": str(cfg.normalization).upper(), "STATE": str(cfg.normalization).upper()}
        assert config["normalization_mapping"] == told["normalization_mapping"] | read


def test_sft_rejects_relative_actions(tmp_path):
    folder = write_checkpoint(tmp_path / "pi0", "pi0", state_dim=8, action_dim=7)
    cfg = POLICIES.get("pi0").settings.model_validate({"model_type": "pi0", "path": str(folder)})
    (folder / "dataset_statistics.json").write_text(
        json.dumps({"data": {"action": dict.fromkeys(("mean", "std", "min", "max", "q01", "q99"), [1.0] * 7)}})
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_relative_actions": True}))
    with pytest.raises(ConfigError, match=r"use_relative_actions=true in config\.json: `embodyrl sft` trains absolute"):
        read_normalizer(folder, cfg, 8, 7)
    with pytest.raises(ConfigError, match=r"model\.delta_dims=6: `embodyrl sft` trains absolute"):
        read_normalizer(folder, cfg.updated({"delta_dims": 6}), 8, 7)
