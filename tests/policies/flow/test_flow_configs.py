"""Model sizes from config.json of openpi, lerobot, transformers and embodyrl."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
from golden_flow import NAMES, spec_of
from tiny_vla import own_config, write_checkpoint

from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies import POLICIES
from embodyrl.policies.flow.specs import GEMMA_300M, PI0, PI05, SMOLVLA, read_spec
from embodyrl.policies.flow.vla.folder import read_units, side_files

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
        (SMOL | {"vlm_model_name": "HuggingFaceTB/SmolVLM2-2.2B-Instruct"}, "2.2B.*not supported"),
        ({"type": "pi0"}, "malformed"),
        ("{", "malformed"),
        ("[]", "malformed"),
    ],
    ids=["variant", "attention", "experts", "backbone", "fields", "json", "list"],
)
def test_other_architectures_and_damaged_files_are_refused(config, match, read):
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
    told = told if "use_relative_actions" in told else {"normalization_mapping": told}
    (folder / "config.json").write_text(json.dumps(config | told))
    factory = POLICIES.get(form)
    cfg = factory.settings.model_validate({"model_type": form, "path": str(folder), "num_action_chunks": 3} | keys)
    with nullcontext() if match is None else pytest.raises(ConfigError, match=match):
        read_units(folder, cfg, 8, 7)
    if "normalization_mapping" in told:
        numbers = {name: [float(i)] * 8 for i, name in enumerate(("q01", "min", "mean", "std", "max", "q99"))}
        entry = {"action": {name: row[:7] for name, row in numbers.items()}, "proprio": numbers}
        (folder / "dataset_statistics.json").write_text(json.dumps({"data": entry}))
        read_units(folder, cfg, 8, 7)
        config = json.loads(side_files(folder, cfg)["config.json"])
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
        read_units(folder, cfg, 8, 7)
    with pytest.raises(ConfigError, match=r"model\.delta_dims=6: `embodyrl sft` trains absolute"):
        read_units(folder, cfg.updated({"delta_dims": 6}), 8, 7)
