"""Adapters written by peft are merged as peft applies them, or rejected by name."""

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from settings import model_of
from transformers import AutoModelForCausalLM, LlamaConfig

from embodyrl import load_policy
from embodyrl.config.shared import Precision
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import ActionKind, ActionSpec, EnvSpec

ASSETS = Path(__file__).parents[2] / "assets"
IDS = torch.arange(24).reshape(2, 12) % 32
ENV = EnvSpec(name="text/toy", action=ActionSpec(dim=1, kind=ActionKind.text), tasks=("toy",), states_per_task=(4,))
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "fractional_alpha": {"lora_alpha": 0.5},
    "output_matrix": {"target_modules": ["q_proj", "lm_head"]},
    "converted_pissa": {"init_lora_weights": "pissa"},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "pissa_niter_4": {"init_lora_weights": "pissa_niter_4"},
    "olora": {"init_lora_weights": "olora"},
    "corda": {"init_lora_weights": "corda"},
    "loftq": {"init_lora_weights": "loftq"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
}
CHANGES_BASE = ("pissa_niter_4", "corda", "loftq")
"""Kinds that change the base weights in a way that the adapter's files do not describe."""
NOT_PLAIN = (*CHANGES_BASE, "pissa", "olora", "dora", "modules_to_save")


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write_adapter(kind: str, model: Any, folder: Path) -> Any:
    """Add an adapter to a model with peft, train it, save it and return the adapted model."""
    fields = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"]} | KINDS[kind]
    if kind == "loftq":  # the initialization needs a package for CUDA; the files differ in the config only
        fields.pop("init_lora_weights")
    config = peft.LoraConfig(**fields)
    if kind == "corda":
        config.corda_config = CordaConfig(corda_method="kpm")

        def run_model() -> None:
            for row in IDS:
                model(row[None])

        preprocess_corda(model, config, run_model=run_model)
    adapted: Any = peft.get_peft_model(model, config)
    options = {}
    if kind == "converted_pissa":
        adapted.peft_config["default"].init_lora_weights = True
        adapted.save_pretrained(str(folder.with_name("initial")))
        adapted.peft_config["default"].init_lora_weights = "pissa"
        options["path_initial_model_for_weight_conversion"] = str(folder.with_name("initial"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    adapted.save_pretrained(str(folder), **options)
    if kind == "loftq":
        content = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(content | KINDS[kind]))
    return adapted


def named(kind: str) -> str:
    """Return a pattern of the error that names the unsupported field."""
    ((key, _),) = KINDS[kind].items()
    return rf"{key}=.* is not supported"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_adapters_equal_peft(kind: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(ASSETS / "causal_lm_tiny", tie_word_embeddings=tied, initializer_range=0.2)
    base, folder = tmp_path / "base", tmp_path / "adapter"
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "causal_lm_tiny" / name, base)
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        unadapted = model(IDS).logits
        expected = write_adapter(kind, model, folder)(IDS).logits
    assert (expected - unadapted).abs().mean() > 0.05
    for trained in (False, True):
        cfg = model_of("causal_lm", precision=Precision.fp32, path=str(base))
        cfg = cfg.updated({"lora.path": str(folder), "is_lora": trained})
        request = PolicyRequest(env=ENV, value_dim=0, temperature=1.0, device="cpu", seed=3)
        if kind in CHANGES_BASE:
            with pytest.raises(CheckpointError, match=named(kind)):
                POLICIES.get("causal_lm").build(cfg, request)
            continue
        policy: Any = POLICIES.get("causal_lm").build(cfg, request)
        with torch.no_grad():
            torch.testing.assert_close(policy.module.lm(IDS).logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["openvla_oft_tabletop", "smolvla_tiny_tabletop"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("corda", "embeddings")])
def test_robot_adapters_equal_peft(kind: str, name: str, tmp_path: Path) -> None:
    """Policies of robots merge plain factors without peft's layers."""
    base, model = ASSETS / name, {"openvla_oft_tabletop": "openvla_oft_tiny"}.get(name, name.removesuffix("_tabletop"))
    overrides = ["env=tabletop", f"model={model}", f"model.path={base}", "model.precision=fp32"]
    module: Any = load_policy(base, *overrides).policy
    unadapted = copy_weights(module.module)
    adapted = write_adapter(kind, module.module, tmp_path / "adapter")
    overrides.append(f"model.lora.path={tmp_path / 'adapter'}")
    if kind in NOT_PLAIN:
        with pytest.raises(ConfigError, match=named(kind)):
            load_policy(base, *overrides)
        return
    expected = copy_weights(adapted.merge_and_unload())
    policy: Any = load_policy(base, *overrides).policy
    merged = copy_weights(policy.module)
    assert merged.keys() == expected.keys()
    changes = [float((expected[key] - unadapted[key]).abs().max()) for key in expected]
    assert max(changes) > 0.01
    for key, weight in merged.items():
        torch.testing.assert_close(weight, expected[key], atol=1e-5, rtol=1e-5)


def copy_weights(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    return {key: weight.clone() for key, weight in module.state_dict().items()}
