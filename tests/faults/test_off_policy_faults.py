"""Off-policy runs with crashed env workers or a resume store each transition once."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from embodyrl.commands.train import train
from embodyrl.plan.config import load_config, load_saved_config

WORDS = (
    *("env=gym", "env.id=Pendulum-v1", "model=mlp", "model.hidden_sizes=[16]", "algorithm=sac"),
    *("actor.global_batch_size=16", "algorithm.learning_starts=16", "algorithm.updates_per_sample=0.1"),
    *("env.train.total_num_envs=3", "env.train.max_steps_per_rollout_epoch=60", "runner.max_steps=5"),
    *("runner.save_interval=1", "checkpoint.keep=9", "runner.logger.backends=[jsonl]"),
)
STEPS = 5 * 60 * 3


class Stopped(Exception):
    """Exception that ends a run."""


def run(folder: Path, name: str, *words: str, killed_at: int = 0, stopped_after: int = 0) -> Path:
    """Train; with `killed_at` an env worker dies at that step, with `stopped_after` the run ends and is resumed."""
    places = (f"runner.output_dir={folder}", f"runner.experiment_name={name}")
    launcher = ("launcher=inline",)
    if killed_at:
        wrapper = f"{{name:pixel_env:DiesOnce,at:{killed_at},marker:{folder}/{name}.died}}"
        launcher = ("launcher.name=mixed_launcher:MixedLauncher", "launcher.env_workers=2", f"env.wrappers=[{wrapper}]")

    def stop(step: int, _: object) -> bool:
        if step == stopped_after:
            raise Stopped
        return False

    cfg = load_config("train", [*WORDS, *places, *launcher, *words])
    if not stopped_after:
        return train(cfg).run
    with pytest.raises(Stopped):
        train(cfg, on_step=stop)
    return train(load_saved_config(folder / name, ["trust=true"]), resume=folder / name).run


def transitions(run: Path) -> dict[str, np.ndarray]:
    """Return the columns of all transitions in the buffer, with `after`, the next observation."""
    arrays = load_file(run / "checkpoints/step_000005/replay.safetensors")
    arrays = {name.split("/")[-1]: array for name, array in arrays.items()}
    starts = np.flatnonzero(arrays["ahead"])
    found = {name: arrays[name][starts] for name in ("observed_state", "action", "reward", "discount")}
    return found | {"after": arrays["observed_state"][starts + arrays["ahead"][starts]]}


def check_physics(found: dict[str, np.ndarray]) -> None:
    """Compare transitions with the equations of the pendulum."""
    (cos, sin, speed), (cos2, sin2, speed2) = found["observed_state"].T, found["after"].T
    angle, torque = np.arctan2(sin, cos), 2 * found["action"][:, 0]  # kept in shares of the bounds
    moved = (speed + (15.0 * sin + 3.0 * torque) * 0.05).clip(-8, 8)
    np.testing.assert_allclose(speed2, moved, atol=1e-4)
    np.testing.assert_allclose(np.angle(np.exp(1j * (np.arctan2(sin2, cos2) - angle - 0.05 * moved))), 0, atol=1e-4)
    np.testing.assert_allclose(found["reward"], -(angle**2 + 0.1 * speed**2 + 0.001 * torque**2), atol=1e-3)
    np.testing.assert_allclose(found["discount"], 0.99)  # a time limit is no end


@pytest.mark.integration
@pytest.mark.parametrize(("killed_at", "stopped_after"), [(0, 0), (70, 0), (130, 3)])
def test_replay_buffer_contains_each_transition_once_after_faults(tmp_path, killed_at, stopped_after):
    """Episodes continue across steps, end at 200 in the fourth step, and restart after a death or a resume."""
    found = transitions(run(tmp_path, "run", killed_at=killed_at, stopped_after=stopped_after))
    assert (tmp_path / "run.died").exists() == bool(killed_at)
    assert len(found["reward"]) == STEPS
    # A lost episode may begin where it did before, not act as it did.
    assert len(np.unique(np.hstack([found["observed_state"], found["action"]]), axis=0)) == STEPS
    check_physics(found)


@pytest.mark.integration
def test_deterministic_run_is_identical_after_crashes_and_resume(tmp_path):
    words = ("runner.deterministic=true", "env.train.continue_episodes=false")
    runs = [run(tmp_path, "whole", *words), run(tmp_path, "hit", *words, killed_at=100, stopped_after=3)]
    assert (tmp_path / "hit.died").exists()
    for name, (whole, hit) in itertools.product(
        ("policy/model", "critics", "replay"), [[run / "checkpoints/step_000005" for run in runs]]
    ):
        one, other = load_file(whole / f"{name}.safetensors"), load_file(hit / f"{name}.safetensors")
        assert one.keys() == other.keys()
        assert all(one[key].tobytes() == other[key].tobytes() for key in one), name
