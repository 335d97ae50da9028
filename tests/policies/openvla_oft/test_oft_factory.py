import dataclasses
import json
import subprocess
import sys

import pytest
from settings import model_of
from transformers import LlamaConfig

from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.plan.config import load_config
from embodyrl.policies import POLICIES
from embodyrl.policies.openvla_oft import FACTORY
from embodyrl.policies.openvla_oft.config import read_config
from embodyrl.policies.settings import LoraSettings
from embodyrl.types import CameraSpec, GripperConvention


def problems(folder=None, **config):
    return FACTORY.validate(model_of(path=None if folder is None else str(folder), **config))


def test_openvla_oft_is_registered():
    assert POLICIES.get("openvla_oft") is FACTORY


@pytest.mark.integration
def test_checks_and_description_do_not_import_torch(env_spec):
    code = (
        "import sys\n"
        "from embodyrl.policies import POLICIES\n"
        "from embodyrl.types import ActionSpec, BenchmarkSpec, CameraSpec, EnvSpec\n"
        "factory = POLICIES.get('openvla_oft')\n"
        "cfg = factory.settings(model_type='openvla_oft', path='assets/openvla_oft_tiny')\n"
        "assert factory.validate(cfg) == []\n"
        "env = EnvSpec(name='e', action=ActionSpec(dim=7), tasks=('a',), states_per_task=(1,),\n"
        "cameras=CameraSpec(names=('c',)), benchmark=BenchmarkSpec(unnorm_key='libero_10'))\n"
        "assert factory.spec(cfg, env, 0).tokens_per_chunk == 56\n"
        "heavy = {'torch', 'tokenizers', 'safetensors', 'PIL', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_missing_path_error_lists_checkpoints():
    (message,) = problems()
    for part in (
        "Haozhan72/Openvla-oft-SFT-libero",
        "RLinf/",
        "or L1",
        "local folder",
        "model=openvla_oft_tiny",
    ):
        assert part in message


def test_missing_folder_or_config_is_an_error(tmp_path):
    assert "is not a folder" in problems(tmp_path / "nowhere")[0]
    assert "has no config.json" in problems(tmp_path)[0]


def test_valid_folder_and_preset_have_no_problems(checkpoint):
    assert problems(checkpoint) == []
    assert problems("assets/openvla_oft_tiny") == []


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"lora": LoraSettings(r=8)}, "model.is_lora=false"),
        ({"lora": LoraSettings(path="nowhere")}, "nowhere contains no adapter_config.json"),
    ],
)
def test_each_invalid_openvla_setting_gives_one_error_line(checkpoint, config, part):
    (message,) = problems(checkpoint, **config)
    assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("word", "meant"),
    [("action_normalization=bound", "bounds"), ("action_head=L1", "l1"), ("image_pipeline=oficial", "official")],
)
def test_misspelled_option_value_suggests_a_valid_value(word, meant):
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
        load_config("train", ["model=openvla_oft_tiny", f"model.{word}"])


def test_adapters_need_trained_weights():
    (message,) = problems("assets/openvla_oft_tiny", is_lora=True)
    assert "no trained weights" in message


def test_openvla_config_errors_are_reported_together(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    assert len(problems(checkpoint, lora=LoraSettings(r=8))) == 2


def test_unknown_statistics_are_an_error(checkpoint, env_spec):
    cfg = model_of(path=str(checkpoint), unnorm_key="libero_9")
    with pytest.raises(CheckpointError, match=r"No statistics 'libero_9'.*Known: .*libero_10_no_noops"):
        POLICIES.get(cfg.model_type).spec(cfg, env_spec, 0)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"tvf_do_letterbox": True}, "tvf_do_letterbox=true"),
        ({"interpolations": ["bicubic", "nearest"]}, "interpolations"),
        ({"image_resize_strategy": "resize-crop"}, "image_resize_strategy"),
        ({"do_center_crop": True}, "do_center_crop=true"),
    ],
)
def test_other_image_preprocessing_is_rejected(checkpoint, edit_json, fields, part):
    edit_json(checkpoint / "preprocessor_config.json", **fields)
    (message,) = problems(checkpoint)
    assert f"{part}" in message
    assert "is not supported" in message


def test_fields_that_transformers_adds_are_accepted(checkpoint, edit_json):
    config = LlamaConfig(**json.loads((checkpoint / "config.json").read_text())["text_config"]).to_dict()
    config["rope_parameters"]["rope_theta"] = 20000.0
    edit_json(
        checkpoint / "config.json", text_config=config, auto_map={"AutoConfig": "a.B"}, hf_llm_id="meta", top_k=50
    )
    assert problems(checkpoint) == []
    assert read_config(checkpoint).llama.rope_theta == 20000.0


def test_unknown_statistics_fields_are_rejected(checkpoint):
    path = checkpoint / "dataset_statistics.json"
    sets = json.loads(path.read_text())
    (name, entry) = next(iter(sets.items()))
    bounds = read_config(checkpoint).statistics.bounds(name, "proprio", "bounds_q99")
    for part, fields in (("proprio", {"mask": [True] * len(bounds.mask)}), ("action", {"offset": [1.0]})):
        path.write_text(json.dumps({name: entry | {part: entry[part] | fields}}))
        with pytest.raises(CheckpointError, match=f"{part}: {next(iter(fields))}=.* is not supported"):
            read_config(checkpoint).statistics.bounds(name, part, "bounds_q99")


def test_incomplete_checkpoint_folders_are_rejected(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "action_head--100_checkpoint.pt").write_bytes(b"")
    for path in checkpoint.glob("model*"):
        path.unlink()
    text = "\n".join(problems(checkpoint))
    assert "has no tokenizer.json" in text
    assert "continuous action head" in text
    assert "contains no model*.safetensors" in text


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"text_config": {"model_type": "qwen2"}}, 'text_config: model_type="qwen2" is not supported'),
        ({"text_config": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}}, "rope_type"),
        ({"text_config": {"rope_scaling": {"type": "linear", "factor": 2.0}}}, "rope_scaling"),
        ({"text_config": {"sliding_window": 128}}, "sliding_window=128 is not supported"),
        ({"text_config": {"head_dim": 7}}, "head_dim=7"),
        ({"arch_specifier": "linear"}, 'arch_specifier="linear" is not supported'),
        ({"image_resize_strategy": "letterbox"}, "image_resize_strategy"),
        ({"use_fused_vision_backbone": False}, "use_fused_vision_backbone=false"),
        ({"timm_override_act_layers": [None, "quick_gelu"]}, "timm_override_act_layers"),
        ({"output_projector_states": True}, "output_projector_states=true"),
        ({"a_later_key": "on"}, 'a_later_key="on" is not supported'),
        ({"text_config": {"num_key_value_heads": 1, "num_attention_heads": 2}}, "num_key_value_heads"),
        ({"timm_model_ids": ["vit_large"]}, "two vision towers"),
        ({"timm_model_ids": ["vit_large", "tiny_vit_patch14_siglip"]}, "unknown vision tower 'vit_large'"),
        ({"pad_token_id": None}, "has no field 'pad_token_id'"),
        ({"pad_token_id": "many"}, "malformed"),
        ({"text_config": 7}, "malformed"),
        ({"type": "act"}, "LeRobot policy of type 'act'. Set model=act."),
        ({"type": "tdmpc"}, "Set model=lerobot."),
    ],
)
def test_configs_of_other_models_are_rejected(checkpoint, edit_json, fields, part):
    edit_json(checkpoint / "config.json", **fields)
    (message,) = problems(checkpoint)
    assert part in message


def test_error_names_the_malformed_json_file(checkpoint):
    (checkpoint / "preprocessor_config.json").write_text("{")
    assert "preprocessor_config.json is missing or malformed" in problems(checkpoint)[0]


def test_spec_declares_shapes_and_gripper(checkpoint, env_spec):
    spec = FACTORY.spec(model_of(path=str(checkpoint)), env_spec, 8)
    assert (spec.tokens_per_chunk, spec.value_dim, spec.inputs.num_images, spec.inputs.state) == (56, 8, 1, False)
    assert spec.gripper == GripperConvention(open=1.0, closed=0.0)


@pytest.mark.parametrize(
    ("config", "env", "part"),
    [
        ({"action_dim": 4}, {}, "model.action_dim=7"),
        ({}, {"cameras": CameraSpec(names=("a",), size=(64, 64), rotation_deg=90)}, r"cameras\.rotation_deg=90"),
    ],
)
def test_spec_rejects_mismatched_environments(checkpoint, env_spec, config, env, part):
    with pytest.raises(ConfigError, match=part):
        FACTORY.spec(model_of(path=str(checkpoint), **config), dataclasses.replace(env_spec, **env), 0)


def test_statistics_key_defaults_to_the_environment_key(checkpoint):
    statistics = checkpoint / "dataset_statistics.json"
    raw = json.loads(statistics.read_text())["libero_10_no_noops"]
    other = json.loads(json.dumps(raw))
    other["action"]["q01"][0] = -9.0
    del other["action"]["mask"]
    statistics.write_text(json.dumps({"libero_10": other, "libero_10_no_noops": raw, "libero_goal_no_noops": raw}))
    found = read_config(checkpoint).statistics
    assert found.find("libero_10") == "libero_10"
    assert found.bounds("libero_10", "action", "bounds_q99").low[0] == -9.0
    assert found.bounds("libero_10", "action", "bounds_q99").mask == (True,) * 7
    assert found.find(None, "libero_goal") == "libero_goal_no_noops"
    assert found.bounds("libero_goal_no_noops", "action", "bounds_q99").mask == (True,) * 6 + (False,)
    assert list(found.bounds("libero_10_no_noops", "action", "bounds").high) == raw["action"]["max"]
    assert list(found.bounds("libero_10_no_noops", "proprio", "bounds_q99").low) == raw["proprio"]["q01"]
    with pytest.raises(CheckpointError, match="libero_goal_no_noops"):
        found.find("bridge_orig", "libero_goal")
    with pytest.raises(CheckpointError, match=r"data sets or robots: .*Set model\.unnorm_key"):
        found.find(None, None)


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("q01", [float("nan")] * 7, "q01.* is nan"),
        ("q99", [float("inf")] * 7, "q99.* is inf"),
        ("q01", [9.0] * 7, "dimension 0 has a negative range or deviation"),
        ("q01", None, "degenerate: no dimension varies"),
    ],
)
def test_unusable_statistics_are_rejected_before_anything_is_built(checkpoint, env_spec, name, row, said):
    statistics = checkpoint / "dataset_statistics.json"
    raw = json.loads(statistics.read_text())
    action = raw["libero_10_no_noops"]["action"]
    action[name] = action["q99"] if row is None else row
    statistics.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=said):
        FACTORY.spec(model_of(path=str(checkpoint)), env_spec, 0)


def test_statistics_file_replaces_statistics_of_the_config(checkpoint):
    statistics = checkpoint / "dataset_statistics.json"
    raw = json.loads(statistics.read_text())
    statistics.write_text(json.dumps({"mine": raw["libero_10_no_noops"]}))
    assert list(read_config(checkpoint).statistics.sets) == ["mine"]
    statistics.unlink()
    assert list(read_config(checkpoint).statistics.sets) == ["libero_10_no_noops"]
