"""How outputs become actions in several passes: token by token (OpenVLA), or by denoising."""

from collections.abc import Callable

import torch
from torch import Tensor

from embodyrl.policies.openvla_oft.heads import cumulative_alphas, ddim_step, ddim_steps, time_embedding
from embodyrl.policies.openvla_oft.llama import KeyValueCache
from embodyrl.policies.openvla_oft.model import ModelInputs, OpenVlaOft
from embodyrl.policies.transfer import on_device

Choose = Callable[[int, Tensor], Tensor]
"""(token index, logits [B, 1, bins]) to the chosen bin [B, 1]."""


def decode_tokens(model: OpenVlaOft, inputs: ModelInputs, choose: Choose) -> tuple[Tensor, Tensor, Tensor]:
    """Predict the action tokens one by one with a key-value cache.

    Returns:
        Logits [B, L, bins], chosen bins [B, L] and values [B, V]; what `model(inputs, tokens)` gives for these tokens.
    """
    body = model.language_model.model
    embeddings, key_mask, last_prompt = model.embed(model.prefix(inputs), inputs, num_slots=0)
    cache = KeyValueCache()
    hidden = body(embeddings, model.attention_mask(key_mask), rows=last_prompt[:, None], cache=cache)
    logits, value = model.read_out(hidden, model.action_columns)
    all_logits, bins = [logits], [choose(0, logits)]
    for index in range(1, model.options.num_action_tokens):
        key_mask = torch.cat([key_mask, key_mask.new_ones(len(key_mask), 1)], dim=1)
        token = body.embed_tokens(bins[-1] + model.action_columns.start)
        position = (last_prompt + index)[:, None]
        hidden = body(token, key_mask[:, None, None, :], positions=position, cache=cache)
        logits, _ = model.read_out(hidden, model.action_columns)
        all_logits.append(logits)
        bins.append(choose(index, logits))
    return torch.cat(all_logits, dim=1), torch.cat(bins, dim=1), value


def denoise(model: OpenVlaOft, inputs: ModelInputs, noise: Tensor, steps: int, prefix: Tensor) -> Tensor:
    """Normalised actions [B, K, A] of the diffusion head after `steps` certain DDIM steps from noise [B, K, A]."""
    alphas, x = on_device(cumulative_alphas(), noise.device), noise
    for step in ddim_steps(steps):
        level = torch.full((len(x),), step, device=x.device)
        x, _ = ddim_step(x, predict_noise(model, inputs, prefix, x, level), level, steps, alphas, 0.0)
    return x


def predict_noise(model: OpenVlaOft, inputs: ModelInputs, prefix: Tensor, noisy: Tensor, step: Tensor) -> Tensor:
    """Noise [B, K, A] in noisy chunks at training steps [B]; the images and the state enter through `prefix`."""
    assert model.action_head is not None
    return model.action_head(noisy_hidden(model, inputs, prefix, noisy, step)).float()


def noisy_hidden(model: OpenVlaOft, inputs: ModelInputs, prefix: Tensor, noisy: Tensor, step: Tensor) -> Tensor:
    """Hidden rows [B, L, D] that the noise in chunks [B, K, A] at training steps [B] is read from."""
    assert model.noisy_action_projector is not None
    # Each scalar becomes the embedding of its action position.
    slots = model.noisy_action_projector(noisy.to(prefix.dtype).flatten(1)[..., None])
    time = time_embedding(step, prefix.shape[-1]).to(prefix)[:, None]
    return model.action_hidden(torch.cat([prefix, time], dim=1), inputs, slots)
