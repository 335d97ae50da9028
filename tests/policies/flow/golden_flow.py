"""Recorded flow models in our layout: sizes, inputs and weights."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from embodyrl.policies.flow.layouts import to_local_names
from embodyrl.policies.flow.likelihood import flow_matching_error, integrate_ode
from embodyrl.policies.flow.model import BACKBONE, FlowInputs
from embodyrl.policies.flow.specs import LayersSpec, Pi0Spec, SmolVlaSpec, VisionSpec, compute_expert_mlp_width
from embodyrl.policies.flow.vla.network import Pi0, SmolVla

GOLDEN = Path(__file__).parents[2] / "golden" / "flow"
NAMES = ("pi0", "pi05", "smolvla")
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


def about(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


def recorded(name):
    return load_file(GOLDEN / f"{name}.io.safetensors")


def stored(name):
    """Return weights under the original names."""
    return load_file(GOLDEN / f"{name}.weights.safetensors")


def spec_of(name):
    return _smolvla_spec(about(name)) if name == "smolvla" else _pi0_spec(about(name))


def _pi0_spec(meta):
    gemma, siglip = meta["gemma"], meta["siglip"]
    layers = LayersSpec(
        width=gemma["width"],
        depth=gemma["depth"],
        mlp=gemma["mlp_dim"],
        heads=gemma["num_heads"],
        kv_heads=gemma["num_kv_heads"],
        head_dim=gemma["head_dim"],
    )
    vision = VisionSpec(
        image_size=siglip["image"],
        patch_size=siglip["patch"],
        width=siglip["width"],
        depth=siglip["depth"],
        heads=siglip["num_heads"],
        mlp=siglip["mlp_dim"],
    )
    return Pi0Spec(
        vision=vision,
        language=layers,
        expert=layers,
        vocab=meta["vocab"],
        horizon=meta["action_horizon"],
        action_dim=meta["action_dim"],
        adaptive=meta["pi05"],
    )


def _smolvla_spec(meta):
    text, vision = meta["text"], meta["vision"]
    language = LayersSpec(
        width=text["hidden_size"],
        depth=text["num_hidden_layers"],
        mlp=text["intermediate_size"],
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        norm_eps=text["rms_norm_eps"],
        gemma=False,
    )
    width = int(language.width * meta["expert_width_multiplier"])
    return SmolVlaSpec(
        vision=VisionSpec(
            image_size=vision["image_size"],
            patch_size=vision["patch_size"],
            width=vision["hidden_size"],
            depth=vision["num_hidden_layers"],
            heads=vision["num_attention_heads"],
            mlp=vision["intermediate_size"],
        ),
        language=language,
        expert=replace(language, width=width, mlp=compute_expert_mlp_width(width)),
        vocab=text["vocab_size"],
        horizon=meta["chunk_size"],
        shuffle=meta["scale_factor"],
        joint_every=meta["self_attn_every_n_layers"],
    )


def build(spec):
    return SmolVla(spec) if isinstance(spec, SmolVlaSpec) else Pi0(spec)


def model_of(name):
    model = build(spec_of(name))
    weights, _ = to_local_names(stored(name), GOLDEN)
    model.load_state_dict(weights)
    return model


def inputs_of(data):
    if "images" in data:
        images, mask = data["images"], data["image_mask"]
    else:
        images = torch.stack([data[f"image.{camera}"] for camera in CAMERAS], dim=1).permute(0, 1, 4, 2, 3)
        mask = torch.stack([data[f"image_mask.{camera}"] for camera in CAMERAS], dim=1)
    return FlowInputs(
        images=images,
        image_mask=mask,
        tokens=data["tokens"].long(),
        token_mask=data["token_mask"],
        state=data["state"],
    )


def velocity_of(model, prefix):
    """Return the model's velocity function, as used by the policy."""
    memory = model.memory(prefix)

    def velocity(x, t):
        out = model.denoise(memory, x, t)
        return out.velocity, out.hidden

    return velocity


def sample(model, prefix, noise, steps):
    """Return actions [B, H, A] for noise, with the integrator of the policy."""
    with torch.no_grad():
        return integrate_ode(velocity_of(model, prefix), noise, steps)


def loss_of(model, prefix, actions, noise, time):
    """Return the loss [B, H, A] whose mean `sft` minimises."""
    return flow_matching_error(velocity_of(model, prefix), actions, noise, time)


def backbone_of(model):
    return [p for name, p in model.named_parameters() if name.startswith(BACKBONE)]
