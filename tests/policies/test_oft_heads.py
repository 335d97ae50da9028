"""Proprioception, continuous heads and FiLM against the original implementations."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from test_oft_model import close, inputs_of

from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.openvla_oft.policy import score_tokens
from embodyrl.policies.openvla_oft.statistics import normalise

CAMERAS = ("agentview", "robot0_eye_in_hand")


@pytest.fixture
def full(checkpoint, golden_dir):
    """A checkpoint folder with a proprioception projector, as the official training writes it."""
    shutil.copy(golden_dir / "heads" / "proprio_projector--100_checkpoint.pt", checkpoint)
    return checkpoint


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
    close(embeddings, want["llm_inputs_embeds"], 1e-5)
    close(hidden, want["action_hidden_states"], 1e-5)


def test_rlinf_official_variant_reads_proprio(full, make_policy, env_spec, golden):
    env = dataclasses.replace(env_spec, state_dim=8)
    module = make_policy(full, env=env, use_proprio=True).module
    want = golden("rlinf_official_variant_batch2")
    batch = dataclasses.replace(inputs_of(golden), state=want["proprio"])
    with torch.no_grad():
        logits, value = module(batch)
    scores = score_tokens(logits / 1.6, want["action_tokens_relative"], value)
    close(scores.logprob, want["logprobs"], 5e-4)
    close(scores.entropy, want["entropy"], 5e-4)


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
