"""The model by itself: its keys, shapes and gradients; what it computes is compared in test_oft_golden.py."""

import json

import torch
from test_oft_golden import close, inputs_of

from embodyrl.policies.openvla_oft import count_parameters
from embodyrl.policies.openvla_oft.config import OftOptions, read_config
from embodyrl.policies.openvla_oft.model import OpenVlaOft
from embodyrl.policies.openvla_oft.settings import OftSettings


def test_two_images_are_two_runs_of_the_towers(checkpoint, make_policy, golden):
    module = make_policy(checkpoint).module
    pixels = golden("inputs")["pixel_values_2img"]
    with torch.no_grad():
        both = module.vision_backbone(pixels)
        close(both, torch.cat([module.vision_backbone(pixels[:, i : i + 6]) for i in (0, 6)], dim=1), 1e-5)


def test_7b_keys_shapes_and_count(golden_dir, checkpoint):
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
    assert count_parameters(config, options) == sum(p.numel() for p in module.parameters()) == 7_541_237_184


def test_unused_weights_get_no_gradient_and_all_others_do(checkpoint, make_policy, golden):
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
