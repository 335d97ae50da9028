"""Proprioception, continuous heads and FiLM against the original implementations."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from test_oft_model import close, inputs_of

from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.openvla_oft import decoding, heads
from embodyrl.policies.openvla_oft.policy import score_tokens
from embodyrl.policies.openvla_oft.statistics import normalise, unnormalise
from embodyrl.types import Observation

CAMERAS = ("agentview", "robot0_eye_in_hand")


@pytest.fixture
def full(checkpoint, golden_dir):
    """A checkpoint folder with a proprioception projector, as the official training writes it."""
    shutil.copy(golden_dir / "heads" / "proprio_projector--100_checkpoint.pt", checkpoint)
    return checkpoint


@pytest.fixture
def official(full, golden_dir, two_images, make_policy):
    """Build a policy of the official recipe; `folders` of the golden data are added to the checkpoint."""

    def make(*folders, **config):
        for folder in folders:
            shutil.copytree(golden_dir / folder, full, dirs_exist_ok=True)
        return make_policy(full, env=two_images, num_images_in_input=2, use_proprio=True, **config)

    return make


@pytest.fixture
def two_images(env_spec):
    return dataclasses.replace(env_spec, cameras=CAMERAS, state_dim=8)


def official_inputs(golden):
    """Two images, prompt and normalised proprioception of the official cases."""
    return dataclasses.replace(
        inputs_of(golden, rows=1),
        pixels=golden("inputs")["pixel_values_2img"][:1],
        state=golden("official_l1_2img_proprio")["proprio_normalized"][None].float(),
    )


def test_proprio_is_normalised_as_the_official_code_does(full, make_policy, two_images, golden):
    policy = make_policy(full, env=two_images, num_images_in_input=2, use_proprio=True)
    want = golden("official_l1_2img_proprio")
    got = normalise(want["proprio_raw"].numpy(), policy._state_bounds, flat_to_zero=False)
    np.testing.assert_allclose(got, want["proprio_normalized"].numpy(), atol=1e-12)


def test_two_images_and_proprio_embeddings(full, make_policy, two_images, golden):
    module = make_policy(full, env=two_images, num_images_in_input=2, use_proprio=True).module
    want, batch = golden("official_l1_2img_proprio"), official_inputs(golden)
    with torch.no_grad():
        prefix = module.prefix(batch)
        embeddings, mask, _ = module.embed(prefix, batch)
        hidden = module.action_hidden(prefix, batch)
    assert mask.all()
    close(embeddings, want["llm_inputs_embeds"], 1e-4)
    close(hidden, want["action_hidden_states"], 1e-4)


def test_rlinf_official_variant_reads_proprio(full, make_policy, env_spec, golden):
    env = dataclasses.replace(env_spec, state_dim=8)
    module = make_policy(full, env=env, use_proprio=True, value_dim=8).module
    heads_of = golden("rlinf_variant_batch2")
    module.load_state_dict({k: v for k, v in heads_of.items() if k.startswith("value_head.")}, strict=False)
    want = golden("rlinf_official_variant_batch2")
    batch = dataclasses.replace(inputs_of(golden), state=want["proprio"])
    with torch.no_grad():
        logits, value = module(batch)
        embeddings, mask, last_prompt = module.embed(module.prefix(batch), batch)
        hidden = module.language_model.model(embeddings, module.attention_mask(mask))
        # That code counts 57 rows back from the end of 1 + 17 + 31 + 56 + 1, which is no prompt token.
        close(module.value_head(hidden[:, 1 + 17 + 31 + 56 + 1 - 57]), want["values"], 1e-4)
        close(value, module.value_head(hidden[torch.arange(2), last_prompt]), 1e-4)
    scores = score_tokens(logits / 1.6, want["action_tokens_relative"], value)
    close(scores.logprob, want["logprobs"], 1e-3)
    close(scores.entropy, want["entropy"], 1e-3)


def test_a_missing_or_doubled_component_is_named(full, make_policy, env_spec):
    env = dataclasses.replace(env_spec, state_dim=8)
    path = full / "proprio_projector--100_checkpoint.pt"
    shutil.copy(path, full / "proprio_projector--200_checkpoint.pt")
    with pytest.raises(CheckpointError, match="2 files of 'proprio_projector'"):
        make_policy(full, env=env, use_proprio=True)
    (full / "proprio_projector--200_checkpoint.pt").unlink()
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="proprio_projector--100"):
        make_policy(full, env=env, use_proprio=True)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.use_proprio"):
        make_policy(full, env=env, use_proprio=True)


def test_a_pt_file_with_code_in_it_is_refused(full, make_policy, env_spec, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"module.fc1.weight": Evil()}, full / "proprio_projector--100_checkpoint.pt")
    with pytest.raises(CheckpointError, match="can run code"):
        make_policy(full, env=dataclasses.replace(env_spec, state_dim=8), use_proprio=True)
    assert not (tmp_path / "ran").exists()


def test_statistics_of_another_robot_are_refused(full, make_policy, env_spec):
    with pytest.raises(ConfigError, match="have 8 dimensions, env 'libero' gives 4"):
        make_policy(full, env=dataclasses.replace(env_spec, state_dim=4), use_proprio=True)


def observe_twice():
    return Observation(
        images=np.random.default_rng(0).integers(0, 256, (2, 2, 64, 64, 3), dtype=np.uint8),
        state=np.zeros((2, 8), np.float32),
        instructions=("put the", "pick up the black bowl"),
    )


def test_l1_head(official, golden):
    policy = official("heads", action_head="l1")
    want = golden("official_l1_2img_proprio")
    with torch.no_grad():
        got = policy.module(official_inputs(golden))[0]
    close(got, want["normalized_actions"], 5e-5)
    np.testing.assert_allclose(unnormalise(got[0].double().numpy(), policy._bounds), want["actions"], atol=5e-5)
    assert sum(p.numel() for p in policy.module.parameters()) == policy.spec.num_parameters


def test_diffusion_head(official, golden):
    policy = official("diffusion", action_head="diffusion", trainable=False)
    want, batch, module = golden("official_diffusion_2img_proprio"), official_inputs(golden), policy.module
    steps = heads.ddim_steps(10)
    assert steps == want["timesteps"].tolist()
    close(heads.cumulative_alphas(), want["alphas_cumprod"], 1e-6)
    close(torch.stack([heads.time_embedding(t, 16) for t in steps]), want["time_embeddings"], 1e-4)
    with torch.no_grad():
        prefix = module.prefix(batch)
        first = decoding.predict_noise(module, batch, prefix, want["noise"], steps[0])
        time = heads.time_embedding(steps[0], 16)[None, None]
        embeddings, _, _ = module.embed(
            torch.cat([prefix, time], dim=1), batch, module.noisy_action_projector(want["noise"].flatten(1)[..., None])
        )
    close(embeddings, want["first_step_llm_inputs_embeds"], 1e-4)
    # The actions after ten steps of this random model say nothing: 1e-7 more noise moves them by 1.
    close(first, want["first_step_noise_pred"], 1e-4)
    with torch.no_grad():
        x, alphas = want["noise"], heads.cumulative_alphas()
        for step in heads.ddim_steps(2):
            x = heads.ddim_update(x, decoding.predict_noise(module, batch, prefix, x, step), step, 2, alphas)
        assert torch.equal(decoding.denoise(module, batch, want["noise"], 2), x)
    assert sum(p.numel() for p in module.parameters()) == policy.spec.num_parameters


def test_ddim_finds_the_clean_actions_if_the_noise_is_predicted_exactly():
    alphas, steps = heads.cumulative_alphas().double(), heads.ddim_steps(10)
    clean, noise = torch.linspace(-1, 1, 9).double(), torch.linspace(2, -2, 9).double()
    levels = [alphas[step] for step in steps] + [torch.ones(())]
    x = levels[0].sqrt() * clean + (1 - levels[0]).sqrt() * noise
    for step, after in zip(steps, levels[1:], strict=True):
        x = heads.ddim_update(x, noise, step, 10, alphas)
        close(x, after.sqrt() * clean + (1 - after).sqrt() * noise, 1e-12)
    close(x, clean, 1e-12)


def test_ddim_clips_the_clean_estimate_and_keeps_the_predicted_noise():
    alphas = torch.tensor([0.81, 0.64, 0.25] * 10)
    count = heads.TRAIN_STEPS
    # From level 0.64 to level 0.81: (2 - 0.6) / 0.8 = 1.75 becomes 1.
    got = heads.ddim_update(torch.tensor([2.0, 0.2]), torch.tensor([1.0, -1.0]), 1, count, alphas)
    close(got, torch.tensor([0.9 + 0.19**0.5, 0.9 - 0.19**0.5]), 1e-6)


def test_film_backbone(official, golden):
    policy = official("heads", "film", action_head="l1", use_film=True)
    want, batch, module = golden("official_film_2img_proprio"), official_inputs(golden), policy.module
    language = module._language_vector(batch)
    close(language[0], want["language_embeddings"][0].mean(dim=0), 1e-6)
    with torch.no_grad():
        close(module.vision_backbone(batch.pixels, language), want["backbone_out"], 1e-4)
        close(module.action_hidden(module.prefix(batch), batch), want["action_hidden_states"], 1e-4)
        got = module(batch)[0]
    np.testing.assert_allclose(unnormalise(got[0].double().numpy(), policy._bounds), want["actions"], atol=5e-5)
    assert sum(p.numel() for p in module.parameters()) == policy.spec.num_parameters


@pytest.mark.parametrize(
    ("folders", "config"),
    [
        (("heads",), {"action_head": "l1"}),
        (("diffusion",), {"action_head": "diffusion", "num_diffusion_steps_inference": 5}),
        (("heads", "film"), {"action_head": "l1", "use_film": True}),
    ],
)
def test_continuous_policies_act_and_save(official, make_policy, two_images, tmp_path, folders, config):
    policy, obs = official(*folders, trainable=False, **config), observe_twice()
    out = policy.act(obs, noise=None)
    assert out.actions.shape == (2, 8, 7)
    assert not np.array_equal(out.actions[0], out.actions[1])
    noise = np.full((2, 56), 0.0, np.float32)  # the end of the interval stays finite
    assert np.isfinite(policy.act(obs, noise=noise).actions).all()
    policy.save(tmp_path / "saved")
    again = make_policy(
        tmp_path / "saved", env=two_images, num_images_in_input=2, use_proprio=True, trainable=False, **config
    )
    np.testing.assert_array_equal(again.act(obs, noise=None).actions, out.actions)


def test_official_training_forward(checkpoint, make_policy, golden):
    """The official SFT forward sees zeros at the action positions, as inference does; batch 2 padded on the right."""
    module, want = make_policy(checkpoint).module, golden("official_train_forward")
    batch, body = inputs_of(golden), module.language_model.model
    with torch.no_grad():
        embeddings, mask, last_prompt = module.embed(module.prefix(batch), batch)
        hidden = body(embeddings, module.attention_mask(mask))
        logits, _ = module(batch)
    close(hidden[mask], want["last_hidden_state"][mask], 1e-4)
    for row, start in enumerate(last_prompt.tolist()):
        close(logits[row], want["logits_31744_32064"][row, start : start + 56, :256], 1e-3)
    # The recorded loss: cross-entropy over the whole vocabulary of the action tokens and STOP.
    with torch.no_grad():
        everything, _ = module(batch, whole_vocabulary=True)
    targets = want["labels"][want["labels"] != -100].view(2, 57)
    loss = torch.nn.functional.cross_entropy(everything.transpose(1, 2), targets)
    assert loss.item() == pytest.approx(want["loss"].item(), rel=1e-5)
