"""Adapters named in the config are applied or the command is rejected; the banner names the merged weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from embodyrl import load_policy
from embodyrl.cli.dry_run import describe
from embodyrl.commands.run_folder import resolve_initial_weights, weight_banner_lines
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.plan.config import load_config
from embodyrl.plan.environment import env_spec
from embodyrl.policies import POLICIES
from embodyrl.policies.openvla_oft.lora import read_adapter
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.vla.adapter import read_adapter_spec

SHIPPED = Path(__file__).parents[2] / "assets" / "openvla_oft_tabletop"
WORDS = ("env=tabletop", "model=openvla_oft_tiny")


def write_adapter(folder: Path, *, module: str = "q_proj", **config: object) -> Path:
    """Write an adapter with large factors for the layers of one name."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for key, weight in load_file(SHIPPED / "model.safetensors").items():
        if key.endswith(f"{module}.weight") and key.startswith("language_model.model.layers"):
            name = f"base_model.model.{key.removesuffix('.weight')}"
            tensors[f"{name}.lora_A.weight"] = 0.3 * torch.randn(4, weight.shape[1], generator=generator)
            tensors[f"{name}.lora_B.weight"] = 0.3 * torch.randn(weight.shape[0], 4, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [module], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described | config))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return shutil.copytree(SHIPPED, tmp_path / "base")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


def test_adapter_is_rejected_for_other_base_weights(base: Path, adapter: Path) -> None:
    plain = load_policy(base, *WORDS, f"model.path={base}")
    adapted = load_policy(base, *WORDS, f"model.path={base}", f"model.lora.path={adapter}")
    key = next(k for k in plain.policy.module.state_dict() if k.endswith("q_proj.weight") and "layers.0" in k)
    before, after = (p.policy.module.state_dict()[key].float() for p in (plain, adapted))
    assert (after - before).abs().max() > 0.1
    with pytest.raises(ConfigError, match=r"replaces the weights that the adapter .* is merged into"):
        load_policy(base, *WORDS, f"model.path={SHIPPED}", f"model.lora.path={adapter}")


@pytest.mark.parametrize("command", ["eval", "train", "serve", "collect"])
def test_banner_shows_the_adapter_and_its_base_weights(command: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    more = [f"collect.out={tmp_path}/out"] if command == "collect" else []
    words = [*WORDS, f"model.path={base}", *more]
    assert f"{base}\n" in f"{describe(load_config(command, words))}\n"
    text = describe(load_config(command, [*words, f"model.lora.path={adapter}"]))
    assert f"{base} + adapter {adapter}, merged" in text
    with pytest.raises(ConfigError, match="Remove one of these keys"):
        describe(load_config(command, [*words, f"model.lora.path={adapter}", f"ckpt={SHIPPED}"]))


def test_trainable_adapter_accepts_other_base_weights(base: Path, adapter: Path) -> None:
    words = [*WORDS, f"model.path={base}", f"model.lora.path={adapter}", "model.is_lora=true"]
    cfg = load_config("train", [*words, f"ckpt={SHIPPED}"])
    weights = resolve_initial_weights(cfg, env_spec(cfg))
    assert weights == SHIPPED
    assert weight_banner_lines(cfg, weights) == [("weights", f"{SHIPPED} + adapter {adapter}, trained further")]


def test_weights_trained_together_with_an_adapter_are_kept(base: Path, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    write_adapter(tmp_path / "saved" / "lora_adapter")
    cfg = load_config("eval", [*WORDS, f"model.path={base}"]).model
    factory = POLICIES.get(cfg.model_type)
    given = cfg.updated({"lora.path": str(tmp_path / "saved")})
    assert factory.validate(given) == []
    (tmp_path / "saved" / "value_head.safetensors").touch()
    assert factory.validate(given) == []
    (tmp_path / "saved" / "beside.safetensors").touch()
    assert "also contains beside.safetensors" in factory.validate(given)[0]


@pytest.mark.parametrize("place", ["lora_adapter", "more/lora_adapter", "."])
@pytest.mark.parametrize("named", ["lora_adapter", "."])
def test_adapter_inside_merged_weights_is_rejected(place: str, named: str, base: Path, tmp_path: Path) -> None:
    merged = shutil.copytree(base, tmp_path / "merged")
    shutil.copytree(write_adapter(tmp_path / "adapter"), merged / place, dirs_exist_ok=True)
    path = merged / place if named == "lora_adapter" else (merged / place).parent if place != "." else merged
    cfg = load_config("eval", [*WORDS, f"model.path={base}"]).model.updated({"lora.path": str(path)})
    found = POLICIES.get(cfg.model_type).validate(cfg)
    assert f"{merged} contains full weights, into which its adapter is already merged" in found[0]


STRANGE = {
    "init_lora_weights": ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "new"),
    "alora_invocation_tokens": ([1, 2],),
    "layer_replication": ([[0, 4], [2, 5]],),
    "trainable_token_indices": ([0, 1],),
    "target_parameters": (["mlp.experts.down_proj"],),
    "rank_pattern": ({"q_proj": 8},),
    "alpha_pattern": ({"q_proj": 8},),
    "modules_to_save": (["lm_head"],),
    "loftq_config": ({"loftq_bits": 4},),
    "use_dora": (True,),
    "use_qalora": (True,),
    "lora_bias": (True,),
    "bias": ("all", "lora_only"),
    "fan_in_fan_out": (True,),
    "peft_type": ("LOHA", "ADALORA"),
    "a_key_of_a_later_version": ("on", True, 2),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in STRANGE.items() for value in values])
def test_error_names_the_unsupported_adapter_field(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{key}=.* is not supported"):
        read_adapter_spec(write_adapter(tmp_path / "a", **{key: value}))


def test_all_peft_config_fields_of_plain_lora_are_accepted(tmp_path: Path) -> None:
    """All fields that peft writes for a plain adapter, and one that is off in a later version."""
    written = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM").to_dict()
    written |= {"target_modules": ["q_proj"], "init_lora_weights": "gaussian", "lora_dropout": 0.1, "later": False}
    written |= {"layers_to_transform": [0], "layers_pattern": "layers", "base_model_name_or_path": "openvla/openvla-7b"}
    assert read_adapter_spec(write_adapter(tmp_path / "a", **written)).scale == 2.0


@pytest.mark.parametrize(("alpha", "scale"), [(0.5, 0.125), (1.5, 0.375), (16, 4.0)])
def test_adapter_scale_may_be_a_fraction(alpha: float, scale: float, base: Path, tmp_path: Path) -> None:
    spec = read_adapter_spec(write_adapter(tmp_path / "a", lora_alpha=alpha))
    assert spec.scale == scale
    adapter = read_adapter(tmp_path / "a")
    name, (low, high) = next(iter(adapter.factors.items()))
    weight = torch.zeros(high.shape[0], low.shape[1])
    torch.testing.assert_close(adapter.merge(f"{name}.weight", weight), high @ low * scale)


@pytest.mark.parametrize(
    "fields", [{"r": 4.5}, {"r": 0}, {"lora_alpha": "8"}, {"lora_alpha": True}, {"use_rslora": "no"}]
)
def test_malformed_adapter_numbers_are_rejected(fields: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing or malformed"):
        read_adapter_spec(write_adapter(tmp_path / "a", **fields))


@pytest.mark.parametrize("trained", [False, True])
def test_full_weights_in_an_adapter_folder_are_used(trained: bool, base: Path, tmp_path: Path) -> None:
    """An adapter folder may contain the full weights of an adapted module, as peft stores a resized output matrix."""
    folder = write_adapter(tmp_path / "a")
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(iter(read_adapter(folder).factors))
    full = torch.randn_like(load_file(base / "model.safetensors")[f"{name}.weight"].float())
    save_file(tensors | {f"base_model.model.{name}.base_layer.weight": full}, folder / "adapter_model.safetensors")
    words = [*WORDS, f"model.path={base}", f"model.lora.path={folder}", "model.precision=fp32"]
    if trained:
        cfg = load_config("train", [*words, "model.is_lora=true"])
        request = PolicyRequest(env=env_spec(cfg), device="cpu", seed=0, trainable=True)
        state = POLICIES.get(cfg.model.model_type).build(cfg.model, request).module.state_dict()
        torch.testing.assert_close(state[f"{name}.base_layer.weight"].float(), full)
    else:
        state = load_policy(base, *words).policy.module.state_dict()
        low, high = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        torch.testing.assert_close(state[f"{name}.weight"].float(), full + 2.0 * high @ low)


def test_adapter_for_another_model_size_is_rejected(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a")
    tensors = {
        k: v[:, :-2] if "lora_A" in k else v for k, v in load_file(adapter / "adapter_model.safetensors").items()
    }
    save_file({k: v.contiguous() for k, v in tensors.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="the adapter is from another model"):
        load_policy(base, *WORDS, f"model.path={base}", f"model.lora.path={adapter}")
