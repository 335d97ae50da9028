"""Keys, shapes and gradients of the model; test_oft_golden.py compares its outputs."""

import json

import pytest
import torch
import torch.nn.functional as F
from test_oft_golden import close, inputs_of

from embodyrl.policies.openvla_oft.config import OftOptions, read_config
from embodyrl.policies.openvla_oft.llama import RmsNorm
from embodyrl.policies.openvla_oft.model import OpenVlaOft
from embodyrl.policies.openvla_oft.settings import OftSettings
from embodyrl.policies.openvla_oft.sizes import estimate_oft_costs
from embodyrl.policies.openvla_oft.vision import PatchEmbed


def test_images_are_encoded_separately(checkpoint, make_policy, golden):
    module = make_policy(checkpoint).module
    pixels = golden("inputs")["pixel_values_2img"]
    with torch.no_grad():
        both = module.vision_backbone(pixels)
        close(both, torch.cat([module.vision_backbone(pixels[:, i : i + 6]) for i in (0, 6)], dim=1), 1e-5)


def test_7b_model_has_the_published_keys_and_shapes(golden_dir, checkpoint):
    config_file = golden_dir / "config_7b_example.json"
    (checkpoint / "dataset_statistics.json").unlink()
    (checkpoint / "config.json").write_bytes(config_file.read_bytes())
    config = read_config(checkpoint)
    options = OftOptions(cfg=OftSettings(model_type="openvla_oft", num_action_chunks=8, action_dim=7))
    with torch.device("meta"):
        module = OpenVlaOft(config, options)
    want = json.loads((golden_dir / "keys_openvla_7b.json").read_text())
    assert {k: list(v.shape) for k, v in module.state_dict().items()} == want
    assert len(want) == 982
    assert (
        estimate_oft_costs(config, options).num_parameters
        == sum(p.numel() for p in module.parameters())
        == 7_541_237_184
    )


def test_only_used_weights_get_a_gradient(checkpoint, make_policy, golden):
    module = make_policy(checkpoint, value_dim=1).module
    logits, value = module(inputs_of(golden))
    (logits.logsumexp(-1).sum() + value.sum()).backward()
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    without = {name for name, p in module.named_parameters() if p.grad is None}
    assert frozen == without
    towers = [f"vision_backbone.{tower}" for tower in ("featurizer.blocks.3", "fused_featurizer.blocks.4")]
    norms = [f"vision_backbone.{tower}.norm" for tower in ("featurizer", "fused_featurizer")]
    unused = (*towers, *norms, "vision_backbone.fused_featurizer.attn_pool")
    assert all(name.startswith(unused) for name in frozen)
    assert len(frozen) == 14 + 12 + 4 + 13


@pytest.mark.parametrize("append_stop", [True, False])
def test_merging_action_placeholders_does_not_change_outputs(checkpoint, make_policy, golden, monkeypatch, append_stop):
    """Two prompts of different lengths: STOP and padding are at different positions in each row."""
    module, batch = make_policy(checkpoint, append_stop=append_stop, value_dim=1).module, inputs_of(golden)
    assert batch.prompt_lengths[0] != batch.prompt_lengths[1]
    body, found, widths = module.language_model.model, [], []
    first = body.layers[0]
    first.register_forward_hook(lambda layer, inputs, out: widths.append(inputs[0].shape[1]))
    for once in (True, False):
        if not once:
            monkeypatch.setattr(OpenVlaOft, "_can_merge_placeholders", lambda self, prefix: False)
        logits, value = module(batch, whole_vocabulary=True)
        parameters = [p for p in module.parameters() if p.requires_grad]
        loss = logits.log_softmax(-1)[..., ::97].square().mean() + value.square().mean()
        found.append([logits, value, *torch.autograd.grad(loss, parameters)])
    assert widths[1] - widths[0] == 55
    for a, b in zip(*found, strict=True):
        # Two orders of summation in float32: 1.02e-4 of the largest gradient was measured on one processor.
        close(a, b, 3e-4 * float(b.detach().abs().max()))


@pytest.mark.parametrize("side", [28, 30])
def test_patch_embedding_matches_the_convolution(checkpoint, side):
    embed = PatchEmbed(read_config(checkpoint).towers[0])
    size = embed.proj.weight.shape[-1]
    pixels = torch.randn(2, 6, side * size // 14, 2 * size)[:, :3]
    found = [embed(pixels), embed.proj(pixels).flatten(2).transpose(1, 2)]
    weights = [torch.autograd.grad(out.square().sum(), list(embed.parameters())) for out in found]
    for a, b in zip([found[0], *weights[0]], [found[1], *weights[1]], strict=True):
        close(a, b, 1e-5 * float(b.detach().abs().max()))


def test_fused_norm_matches_its_formula():
    torch.manual_seed(0)
    norm, x = RmsNorm(32, 1e-2), torch.randn(3, 5, 32, requires_grad=True)
    torch.nn.init.normal_(norm.weight)
    found = [norm(x), F.rms_norm(x, (32,), norm.weight, norm.eps)]
    slopes = [torch.autograd.grad(out.sin().sum(), [x, norm.weight]) for out in found]
    for a, b in zip([found[0], *slopes[0]], [found[1], *slopes[1]], strict=True):
        close(a, b, 1e-5, 1e-5)
