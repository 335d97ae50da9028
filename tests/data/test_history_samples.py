"""Observation histories: data.history only fits policies with n_obs_steps, and all steps are augmented equally."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from demos import ENV, demonstration
from lerobot_sets import numbers, write_set

from embodyrl.cli.main import main
from embodyrl.data.augment import augment, sample_augmentations
from embodyrl.data.cards import read_card
from embodyrl.data.layout import Card
from embodyrl.data.writer import DatasetWriter
from embodyrl.envs.history import with_history
from embodyrl.plan.build import mismatches
from embodyrl.types import PolicySpec

DIFFUSION = Path("assets/diffusion_pusht/config.json")


@pytest.mark.parametrize("cameras", [1, 2])
def test_all_steps_of_a_history_are_augmented_equally(cameras: int) -> None:
    """A still scene stays still, and the cameras differ."""
    samples, steps = 6, 3
    images = np.random.default_rng(0).integers(0, 256, (samples, cameras, 32, 32, 3), np.uint8)
    history = np.concatenate([images] * steps, axis=1)
    draws = sample_augmentations((7, 8), samples, 4, steps * cameras, steps)
    assert draws.shape == (6, samples, steps * cameras)
    changed = augment(history, draws, torch.device("cpu")).reshape(samples, steps, cameras, 32, 32, 3)
    for step in range(1, steps):
        np.testing.assert_array_equal(changed[:, step], changed[:, 0])
    assert len(draws[0].unique()) == samples * cameras
    assert len(sample_augmentations((7, 8), samples, 4, steps * cameras, 1)[0].unique()) == samples * cameras * steps


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("flow_small", "model 'flow_small' reads 1 observation step per sample. Set data.history=1."),
        ("cnn", "model 'cnn' has no n_obs_steps. Set data.history=1."),
        ("act", "model 'act' reads 1 observation step"),
        ("smolvla_tiny", "model 'smolvla' reads 1 observation step"),
        ("openvla_oft_tiny", "model 'openvla_oft' reads 1 observation step"),
    ],
)
def test_history_needs_a_policy_that_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, error: str
) -> None:
    root = write_set(tmp_path / "set", columns={"action": numbers(7), "observation.state": numbers(4)})
    assert main(["sft", f"data.path={root}", f"model={model}", "data.history=2", "--dry-run"]) == 2
    assert f"data.history=2: {error}" in " ".join(capsys.readouterr().err.split())


def test_dry_run_rejects_data_that_do_not_fit_the_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_set(tmp_path / "set", columns={"action": numbers(7), "observation.state": numbers(4)})
    assert main(["sft", f"data.path={root}", "model=openvla_oft_tiny", "--dry-run"]) == 2
    assert "data.gripper=[open,closed] sets the gripper convention" in " ".join(capsys.readouterr().err.split())


def test_data_with_a_history_need_a_policy_that_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = DatasetWriter(tmp_path / "set", Card(env=with_history(ENV, 2), fps=20, video=False))
    d = demonstration(0)
    writer.append(replace(d, images=np.tile(d.images, (1, 2, 1, 1, 1)), state=np.tile(d.state, 2)))
    writer.flush()
    writer.close()
    assert main(["sft", f"data.path={tmp_path}/set", "model=flow_small", "--dry-run"]) == 2
    error = "model 'flow_small' reads 1 observation step per sample. The data contain 2 steps per sample."
    assert error in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("history", "status"), [(2, 0), (1, 2), (3, 2)])
def test_diffusion_policy_on_states_needs_its_own_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], history: int, status: int
) -> None:
    root = write_set(tmp_path / "set", cameras=(), columns={"action": numbers(2), "observation.state": numbers(4)})
    config = json.loads(DIFFUSION.read_text()) | {"n_obs_steps": 2, "horizon": 8, "n_action_steps": 2}
    (folder := tmp_path / "policy").mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"down_dims": [8, 16], "embodyrl_init": "random"}))
    words = ["runner.max_steps=1", "actor.global_batch_size=4", "actor.micro_batch_size=4", "launcher=inline"]
    words += ["model=diffusion", f"model.path={folder}", "model.num_action_chunks=2", f"data.history={history}"]
    assert main(["sft", f"data.path={root}", f"runner.output_dir={tmp_path}/runs", *words]) == status
    if status:
        assert "reads 2 observation steps per sample. Set data.history=2." in " ".join(capsys.readouterr().err.split())


def test_environment_history_must_equal_the_policys_observation_steps() -> None:
    policy = PolicySpec(name="x", num_action_chunks=1, action_dim=7, tokens_per_chunk=7, gripper=ENV.action.gripper)
    (problem,) = mismatches(with_history(ENV, 2), policy)
    assert "provides 2 observation steps, but model 'x' reads 1; set env.history=1" in problem
    assert mismatches(ENV, policy) == []


def test_history_of_recorded_data_is_stored(tmp_path: Path) -> None:
    for steps in (1, 2):
        text = Card(env=with_history(ENV, steps), fps=20, video=False).to_json()
        assert Card.from_json(text).env.history == steps
        assert f'"history": {steps}' in text
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/embodyrl.json").write_text(text)
    assert read_card(tmp_path).env.history == 2
