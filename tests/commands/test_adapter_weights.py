"""Adapters named in the config are applied or the command is refused; the banner names the merged weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from embodyrl import load_policy
from embodyrl.commands.dry_run import describe
from embodyrl.commands.run_folder import first_weights, weight_facts
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.plan.config import load_config
from embodyrl.plan.environment import env_spec
from embodyrl.policies import POLICIES

SHIPPED = Path(__file__).parents[2] / "assets" / "openvla_oft_tabletop"
pytestmark = pytest.mark.needs("openvla_oft", "own_loop", "tabletop")
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
def test_banner_names_the_adapter_and_its_base_weights(command: str, base: Path, adapter: Path, tmp_path: Path) -> None:
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
    weights = first_weights(cfg, env_spec(cfg))
    assert weights == SHIPPED
    assert weight_facts(cfg, weights) == [("weights", f"{SHIPPED} + adapter {adapter}, trained further")]


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


def test_adapter_for_another_model_size_is_rejected(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a")
    tensors = {
        k: v[:, :-2] if "lora_A" in k else v for k, v in load_file(adapter / "adapter_model.safetensors").items()
    }
    save_file({k: v.contiguous() for k, v in tensors.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="the adapter is from another model"):
        load_policy(base, *WORDS, f"model.path={base}", f"model.lora.path={adapter}")
