"""LoRA adapters against the original implementation with peft, and against merged weights."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from settings import model_of
from test_oft_golden import inputs_of
from test_oft_policy import observe, uniforms

from embodyrl.config.shared import Precision
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies import export_policy
from embodyrl.policies.openvla_oft.lora import read_adapter
from embodyrl.policies.settings import LoraSettings
from embodyrl.policies.vla.adapter import read_adapter_spec


@pytest.fixture
def adapter(golden_dir):
    return golden_dir / "lora_adapter"


def trained(policy):
    return {name: p.detach().clone() for name, p in policy.module.named_parameters() if p.requires_grad}


def take_a_step(policy, obs, tokens):
    optimizer = torch.optim.SGD([p for p in policy.module.parameters() if p.requires_grad], lr=0.05)
    scores = policy.score(obs, tokens)
    (scores.logprob.mean() + scores.value.mean()).backward()
    optimizer.step()


def test_exported_adapter_run_has_the_published_layout(checkpoint, make_policy, env_spec, golden, adapter, tmp_path):
    config = {"is_lora": True, "lora": LoraSettings(path=str(adapter)), "precision": Precision.bf16}
    make_policy(checkpoint, value_dim=1, **config).save(tmp_path / "saved")
    export_policy(model_of(path=str(checkpoint), **config), env_spec, tmp_path / "saved", tmp_path / "public")
    names = {path.name for path in (tmp_path / "public").iterdir()}
    assert "model.safetensors" in names
    assert not names & {"lora_adapter", "value_head.safetensors"}
    assert {t.dtype for t in load_file(tmp_path / "public" / "model.safetensors").values()} == {torch.bfloat16}
    with torch.no_grad():
        logits, _ = make_policy(tmp_path / "public").module(inputs_of(golden, rows=1))
    want = golden("official_lora_discrete_1img")["action_logits_31744_32064"][..., :256]
    # The merged weights are rounded to the bfloat16 of the base: far closer to the adapted than to the base model.
    base = golden("official_discrete_1img")["action_logits_31744_32064"][..., :256]
    assert (logits - want).abs().mean() < 0.05 * (base - want).abs().mean()


def test_all_linear_option_selects_the_modules_of_the_published_adapter(checkpoint, make_policy, adapter):
    policy = make_policy(checkpoint, is_lora=True, value_dim=1, lora=LoraSettings(r=4, lora_alpha=4))
    injected = {name.partition(".lora_A.")[0] for name in policy.module.state_dict() if ".lora_A." in name}
    assert injected == set(read_adapter(adapter).factors)
    names = set(trained(policy))
    assert all(".lora_" in name or name.startswith("value_head.") for name in names)
    assert policy.costs.num_trained == sum(p.numel() for p in trained(policy).values())
    # Adapters of the unused last blocks and of the attention pool never get a gradient.
    assert not any(
        "attn_pool" in name or ("featurizer.blocks.3.attn" in name and "fused" not in name) for name in names
    )
    untouched = make_policy(checkpoint, value_dim=1)
    # New adapters add zeros; only the adapted patch embedding computes its sums in another order.
    out = policy.act(observe(), noise=uniforms(4))
    same = untouched.score(observe(), out.tokens).logprob.detach()
    np.testing.assert_allclose(out.logprob, same, atol=1e-4 * float(same.abs().max()))
    tokens = policy.act(observe(), noise=uniforms(4)).tokens
    scores = policy.score(observe(), tokens)
    (scores.logprob.sum() + scores.value.sum()).backward()
    for name, parameter in policy.module.named_parameters():
        assert (parameter.grad is not None) == (name in names), name


def test_initial_adapter_sets_the_trained_parameters(checkpoint, make_policy, adapter):
    policy = make_policy(checkpoint, is_lora=True, value_dim=8, lora=LoraSettings(path=str(adapter)))
    assert policy.costs.num_trained == sum(p.numel() for p in trained(policy).values())


@pytest.mark.parametrize(("init", "std"), [("gaussian", 0.25), ("kaiming", 0.144)])
def test_initial_lora_factors_match_the_settings(checkpoint, make_policy, init, std):
    policy = make_policy(checkpoint, is_lora=True, lora=LoraSettings(r=4, lora_alpha=4, init_lora_weights=init))
    state = policy.module.state_dict()
    # Gaussian: 1/r. Kaiming-uniform with a = sqrt(5): 1 / sqrt(3 * fan_in), here of 16 inputs.
    low = torch.cat([state[f"language_model.model.layers.{i}.mlp.up_proj.lora_A.default.weight"] for i in range(3)])
    assert low.std() == pytest.approx(std, rel=0.2)
    assert all(not tensor.any() for name, tensor in state.items() if ".lora_B." in name)
    same = make_policy(checkpoint, is_lora=True, lora=LoraSettings(r=4, lora_alpha=4, init_lora_weights=init))
    other = make_policy(checkpoint, is_lora=True, seed=1, lora=LoraSettings(r=4, lora_alpha=4, init_lora_weights=init))
    for a, b, c in zip(*(trained(p).values() for p in (policy, same, other)), strict=True):
        assert torch.equal(a, b)
        assert not a.any() or not torch.equal(a, c)


def test_adapter_checkpoints_contain_only_trained_weights(checkpoint, make_policy, tmp_path):
    config = {"value_dim": 1, "lora": LoraSettings(r=4, lora_alpha=8)}
    policy, obs = make_policy(checkpoint, is_lora=True, **config), observe()
    take_a_step(policy, obs, policy.act(obs, noise=uniforms(4)).tokens)
    out = policy.act(obs, noise=None)
    policy.save(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("model*"))
    again = make_policy(checkpoint, is_lora=True, seed=1, **config)
    again.load_weights(tmp_path / "saved")
    for a, b in zip(trained(policy).values(), trained(again).values(), strict=True):
        assert torch.equal(a, b)
    np.testing.assert_array_equal(again.act(obs, noise=None).logprob, out.logprob)
    merged = make_policy(checkpoint, value_dim=1)
    before = merged.act(obs, noise=None).value
    merged.load_weights(tmp_path / "saved")
    merged.load_weights(tmp_path / "saved")  # merging starts from the base, so that twice is once
    np.testing.assert_allclose(merged.act(obs, noise=None).value, out.value, atol=1e-4)
    assert np.abs(before - out.value).max() > 1e-2


def test_adapters_are_fp32_on_a_bf16_base(checkpoint, make_policy):
    policy = make_policy(checkpoint, is_lora=True, value_dim=1, precision=Precision.bf16, lora=LoraSettings(path=None))
    base = {p.dtype for n, p in policy.module.named_parameters() if ".lora_" not in n and "value_head" not in n}
    assert base == {torch.bfloat16}
    assert {p.dtype for p in trained(policy).values()} == {torch.float32}
    out = policy.act(observe(), noise=uniforms(4))
    scores = policy.score(observe(), out.tokens)
    np.testing.assert_allclose(scores.logprob.detach().numpy(), out.logprob, atol=1e-6)


def test_mismatched_adapters_are_an_error(checkpoint, make_policy, adapter, tmp_path):
    damaged = tmp_path / "adapter"
    damaged.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")

    def write(tensors, **fields):
        save_file(tensors, damaged / "adapter_model.safetensors")
        (damaged / "adapter_config.json").write_text(json.dumps(config | fields))

    write({k: v for k, v in tensors.items() if not k.endswith("projector.fc1.lora_A.weight")})
    with pytest.raises(CheckpointError, match=r"'projector\.fc1' has only one"):
        make_policy(checkpoint, is_lora=True, lora=LoraSettings(path=str(damaged)))
    write({k: v for k, v in tensors.items() if "projector.fc1." not in k})
    with pytest.raises(CheckpointError, match=r"differ in module 'projector\.fc1'"):
        make_policy(checkpoint, is_lora=True, lora=LoraSettings(path=str(damaged)))
    foreign = {k.replace("projector.fc1", "projector.fc9"): v for k, v in tensors.items()}
    write(foreign)
    with pytest.raises(CheckpointError, match=r"adapts 'projector\.fc9\.weight', which .* another model"):
        make_policy(checkpoint, lora=LoraSettings(path=str(damaged)))
    write(tensors, r=8)
    with pytest.raises(CheckpointError, match="does not have the rank 8"):
        make_policy(checkpoint, is_lora=True, lora=LoraSettings(path=str(damaged)))
    for targets in ("q_prj", "q_proj,q_prj"):
        with pytest.raises(ConfigError, match=r"'q_prj' matches no layer.*q_proj"):
            make_policy(checkpoint, is_lora=True, lora=LoraSettings(target_modules=targets))


@pytest.mark.parametrize(("stabilised", "scale"), [(False, 2.0), (True, 4.0)])
def test_saved_adapter_is_readable_by_peft(checkpoint, make_policy, tmp_path, stabilised, scale):
    from peft import PeftConfig

    lora = LoraSettings(r=4, lora_alpha=8, target_modules="q_proj,v_proj", use_rslora=stabilised)
    policy = make_policy(checkpoint, is_lora=True, lora=lora)
    layers = [layer for layer in policy.module.modules() if hasattr(layer, "scaling")]
    assert [layer.scaling["default"] for layer in layers] == [scale] * 2 * 3
    policy.save(tmp_path / "saved")
    config = PeftConfig.from_pretrained(str(tmp_path / "saved" / "lora_adapter"))
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 8, {"q_proj", "v_proj"})
    assert config.use_rslora is stabilised
    assert read_adapter_spec(tmp_path / "saved" / "lora_adapter").scale == scale
    assert len(load_file(tmp_path / "saved" / "lora_adapter" / "adapter_model.safetensors")) == 2 * 2 * 3
