"""Recorded tensors of LeRobot 0.4.4 (tests/golden/lerobot/README.md) are reproduced.

Limits are multiples of the difference between our float32 and float64 results, measured by the test, relative to the
largest expected number of a tensor.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from golden_lerobot import (
    ACT,
    DIFFUSION,
    assert_within_rounding,
    doubled,
    folder_of,
    meta,
    observation,
    policy_of,
    recorded,
)

from embodyrl.policies.lerobot.diffusion.schedule import Schedule


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Return the policies of all cases, with the settings of their checkpoints; diffusion samples ten DDIM steps."""
    root = tmp_path_factory.mktemp("golden")
    keys = {"act": {}, "diffusion": {"sampler": "DDIM", "num_inference_steps": 10}}
    made = {}
    for case in (*ACT, *DIFFUSION):
        policy = policy_of(folder_of(case, root / case), **keys[case.partition("/")[0]])
        made[case] = policy, policy._config, recorded(case)
    return made


_COMPARED = []
"""Comparisons of the running test: name, our value, recorded value."""


def close(actual, expected, name):
    """Compare with a recorded tensor at the end of the test (see `within_rounding`)."""
    assert actual.shape == expected.shape, name
    _COMPARED.append((name, actual.detach(), expected))


def within_rounding(check):
    """Run a test in float32 and float64, and compare its float32 results within the limits of the difference."""

    @functools.wraps(check)
    def test(cases, case, **given):
        _COMPARED.clear()
        check(cases=cases, case=case, **given)
        single = [*_COMPARED]
        _COMPARED.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            check(cases={case: in_float64(*cases[case])}, case=case, **given)
        names = [(name, expected) for name, _, expected in single]
        assert_within_rounding([ours for _, ours, _ in single], [exact for _, exact, _ in _COMPARED], names)

    return test


def in_float64(policy, config, data):
    """Return a case in float64; the table of a noise schedule stays in float32."""
    kept = {k for k, v in data.items() if v.dtype != torch.float32 or k.startswith("schedule.")}
    return doubled(policy), config, {k: v if k in kept else v.double() for k, v in data.items()}


def check_gradients(network, data, case):
    weights = {f"{'model' if case.startswith('act') else 'diffusion'}.{k}": w for k, w in network.named_parameters()}
    for name in meta(case)["gradients_of"]:
        grad = weights[name].grad
        if f"grad.{name}" in data:
            close(grad, data[f"grad.{name}"], name)
        else:
            close(grad.flatten()[:2000], data[f"grad_flat_head.{name}"], name)
            close(grad.double().norm(), data[f"grad_norm.{name}"].double().squeeze(), name)
    norm = sum(w.grad.double().square().sum() for w in weights.values() if w.grad is not None).sqrt()
    close(norm, data["grad_norm_total"].double().squeeze(), "grad_norm_total")


@pytest.mark.parametrize("case", [*ACT, *DIFFUSION])
def test_normalization_is_bit_identical_to_lerobot(cases, case):
    policy, config, data = cases[case]
    inputs = policy._build_inputs(observation(config, data, "raw."))
    assert torch.equal(policy._from_actions(data["raw.action"].numpy()), data["normalised.action"])
    pairs = [("observation.state", inputs.state), (config.environment_name, inputs.environment)]
    for name, found in pairs:
        if found is not None:
            assert torch.equal(found.view_as(data[f"normalised.{name}"]), data[f"normalised.{name}"]), name


@pytest.mark.parametrize("case", ACT)
@within_rounding
def test_act_losses_and_gradients_match_lerobot(cases, case, monkeypatch):
    policy, config, data = cases[case]
    network, obs = policy.module.network, observation(config, data, "raw.")
    target, padding = policy._from_actions(data["raw.action"].numpy()), data["action_is_pad"]
    inputs = policy._build_inputs(obs)
    tokens, latent = network.embed(inputs), torch.zeros(len(target), config.latent_dim)
    if config.use_vae:
        posterior = network.posterior(inputs, target, padding)
        close(posterior.mean, data["train.mu"], "mu")
        close(posterior.log_variance, data["train.log_sigma_x2"], "log_sigma_x2")
        close(posterior.divergence().mean()[None], data["train.kld_loss"][None], "kld_loss")
        latent = posterior.mean + (posterior.log_variance / 2).exp() * data["train.latent_noise"]
    encoded = network.encode(tokens, latent)
    close(encoded, data["train.encoder_out.0"], "encoder")
    hidden: list[torch.Tensor] = []
    with network.decoder.register_forward_hook(lambda module, args, out: hidden.append(out)):
        actions = network.decode(tokens, encoded)
    close(hidden[0], data["train.decoder_out.0"], "decoder")
    close(actions, data["train.actions_hat"], "actions")
    close((actions - target).abs() * ~padding[..., None], data["train.l1_elements"], "l1")
    monkeypatch.setattr(torch, "randn_like", lambda mean: data["train.latent_noise"])
    loss = policy.loss(obs, target, padding).mean()
    close(loss[None], data["train.loss"][None], "loss")
    network.zero_grad()
    loss.backward()
    check_gradients(network, data, case)


@pytest.mark.parametrize("case", ACT)
@within_rounding
def test_act_embeddings_match_lerobot(cases, case):
    policy, config, data = cases[case]
    network, inputs = policy.module.network, policy._build_inputs(observation(config, data, "raw."))
    tokens = network.embed(inputs)
    start = 1 + (inputs.state is not None) + (inputs.environment is not None)
    for index in range(len(config.cameras)):
        grid = network.backbone(inputs.images[:, 0, index])
        close(grid, data[f"train.feature_map.{index}"], "feature map")
        count = grid[0, 0].numel()
        first, expected = start + index * count, data[f"train.image_pos.{index}"].flatten(2)[0].T
        close(tokens.positions[first : first + count, 0], expected, "places")
        seen = data[f"train.image_tokens.{index}"].flatten(2).permute(2, 0, 1)
        close(tokens.content[first - 1 : first - 1 + count], seen, "tokens")


@pytest.mark.parametrize("case", ACT)
@within_rounding
def test_act_chunks_match_lerobot(cases, case):
    policy, config, data = cases[case]
    read = policy._encode(observation(config, data, "raw."))
    close(read.model[1], data["eval.encoder_out.0"], "encoder")
    chunk = policy.module.network.decode(*read.model)
    close(chunk, data["eval.chunk"], "chunk")
    whole = torch.from_numpy(policy._to_actions(chunk.detach()))
    close(whole, data["eval.chunk_unnormalised"], "unnormalised")


@pytest.mark.parametrize("case", ["act/image", "act/novae"])
@within_rounding
def test_executed_actions_match_the_lerobot_action_queue(cases, case):
    """One query per `n_action_steps` actions."""
    policy, config, data = cases[case]
    every = config.n_action_steps
    for t in range(6):
        if t % every == 0:
            actions = policy.act(observation(config, data, "", [t]), noise=None).actions
        expected = policy._normalizer.unnormalize("action", data[f"episode.{t}.selected"])
        close(torch.from_numpy(actions[:, t % every]), expected, t)


@pytest.mark.parametrize("case", DIFFUSION)
@within_rounding
def test_diffusion_losses_and_gradients_match_lerobot(cases, case):
    policy, config, data = cases[case]
    network, inputs = policy.module.network, policy._build_inputs(observation(config, data, "raw."))
    network.train(meta(case)["train_mode"])
    target, level = policy._from_actions(data["raw.action"].numpy()), data["train.timesteps"]
    schedule = policy._schedule
    assert torch.equal(schedule.alphas_cumprod, data["schedule.alphas_cumprod"])
    noisy = schedule.add_noise(target, data["train.eps"], level)
    close(noisy, data["train.noisy_actions"], "noisy")
    condition = network.condition(inputs)
    embedded = network.unet.diffusion_step_encoder(level)
    close(embedded, data["train.step_embedding.0"], "step")
    close(network.unet(noisy, level, condition), data["train.unet.0"], "unet")
    elements = policy.compute_errors(condition, target, data["train.eps"], level)
    mask = ~data["action_is_pad"][..., None] if config.do_mask_loss_for_padding else torch.ones(())
    close(elements * mask, data["train.loss_elements"], "elements")
    loss = (elements * mask).mean()
    close(loss[None], data["train.loss"][None], "loss")
    network.zero_grad()
    loss.backward()
    check_gradients(network, data, case)
    network.eval()


@pytest.mark.parametrize("case", ["diffusion/image", "diffusion/separate"])
@within_rounding
def test_diffusion_spatial_softmax_matches_lerobot(cases, case):
    policy, config, data = cases[case]
    network, inputs = policy.module.network, policy._build_inputs(observation(config, data, "raw."))
    separate = config.use_separate_rgb_encoder_per_camera
    for index, encoder in enumerate(network.rgb_encoder if separate else [network.rgb_encoder]):
        found = {}
        hooks = [
            part.register_forward_hook(lambda _, __, out, name=name, found=found: found.__setitem__(name, out))
            for name, part in (("feature_map", encoder.backbone), ("keypoints", encoder.pool))
        ]
        images = inputs.images[:, :, index] if separate else inputs.images
        features = encoder(images.flatten(0, -4))
        for hook in hooks:
            hook.remove()
        for name, tensor in (*found.items(), ("features", features)):
            close(tensor, data[f"train.rgb{index}.{name}.0"], name)


@pytest.mark.parametrize("case", DIFFUSION)
@pytest.mark.parametrize(("sampler", "steps"), [("DDIM", 10), ("DDPM", 10), ("DDPM", 100)])
@torch.no_grad()
@within_rounding
def test_denoising_steps_match_lerobot(cases, case, sampler, steps):
    policy, config, data = cases[case]
    condition = policy._encode(observation(config, data, "raw.")).model
    close(condition, data["eval.global_cond"], "condition")
    name, schedule, x = f"sample.{sampler.lower()}{steps}", Schedule(config, steps, sampler), data["sample.noise"]
    assert torch.equal(schedule.timesteps, data[f"{name}.timesteps"])
    if steps == 100:
        seed = int(meta(case)["ddpm_full_step_noise"].partition("(")[2].partition(")")[0])
        noise = torch.from_numpy(np.random.RandomState(seed).standard_normal((100, *x.shape)).astype(np.float32))
    else:
        noise = torch.cat([data.get(f"{name}.step_noise", torch.zeros(9, *x.shape)), torch.zeros(1, *x.shape)])
    for index, number in enumerate(schedule.timesteps.tolist()):
        level = torch.full((len(x),), number)
        step = schedule.step(x, policy.module.network.unet(x, level, condition), level)
        x = step.mean + step.std * noise[index]
        if steps == 10:
            close(x, data[f"{name}.trajectory"][index], index)
    close(x, data[f"{name}.out"], "out")
    for number in (0, 47, 99):
        predicted = policy.module.network.unet(data["train.eps"], torch.full((len(x),), number), condition)
        close(predicted, data[f"eval.unet_at_{number}"], number)


@pytest.mark.parametrize("case", DIFFUSION)
@torch.no_grad()
@within_rounding
def test_history_chunks_match_the_lerobot_action_queue(cases, case):
    """One query per `n_action_steps` actions; the first observation fills the history."""
    policy, config, data = cases[case]
    close(policy._select_executed(data["sample.ddim10.out"]), data["eval.chunk"], "chunk")
    every = config.n_action_steps
    for t in range(sum(name.endswith(".selected") for name in data)):
        if t % every == 0:
            history = [max(0, t - back) for back in reversed(range(config.n_obs_steps))]
            condition = policy._encode(observation(config, data, "", history)).model
            unet = functools.partial(policy.module.network.unet, condition=condition)
            rows = policy._select_executed(policy._schedule.denoise(unet, data["sample.noise"]))
        close(rows[:, t % every], data[f"episode.{t}.selected"], t)


PARTS = {
    "act": {
        "vae_encoder_out": "vae_encoder",
        "latent_token": "encoder_latent_input_proj",
        "state_token": "encoder_robot_state_input_proj",
    },
    "diffusion": {"down0_first": "unet.down_modules.0.0", "mid_last": "unet.mid_modules.1"},
}


@pytest.mark.parametrize("case", [*ACT, *DIFFUSION])
@within_rounding
def test_module_outputs_match_lerobot(cases, case, monkeypatch):
    policy, config, data = cases[case]
    kind, network, found, hooks = case.partition("/")[0], policy.module.network, {}, []
    for name, module in PARTS[kind].items():
        if f"train.{name}.0" in data:
            part = network.get_submodule(module)
            hooks.append(part.register_forward_hook(lambda _, __, out, name=name: found.__setitem__(name, out)))
    obs, target = observation(config, data, "raw."), policy._from_actions(data["raw.action"].numpy())
    if kind == "act":
        monkeypatch.setattr(torch, "randn_like", lambda mean: data["train.latent_noise"])
        loss = policy.loss(obs, target, data["action_is_pad"]).mean()
        close(loss[None], data["train.loss"][None], "loss")
    else:
        policy.compute_errors(
            network.condition(policy._build_inputs(obs)), target, data["train.eps"], data["train.timesteps"]
        )
        rows = torch.from_numpy(policy._to_actions(data["eval.chunk"]))
        close(rows, data["eval.chunk_unnormalised"], "actions")
    for hook in hooks:
        hook.remove()
    assert found
    for name, out in found.items():
        close(out, data[f"train.{name}.0"], name)
