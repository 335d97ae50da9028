"""Residual policies on flow and OpenVLA-OFT models in complete training runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from embodyrl.commands.evaluate import evaluate
from embodyrl.commands.export import export
from embodyrl.commands.train import train
from embodyrl.plan.config import load_config, load_saved_config, load_with_ckpt

SAME = (
    *("model.likelihood=residual", "model.num_action_chunks=4", "launcher=inline", "runner.deterministic=true"),
    *("runner.logger.backends=[jsonl]", "env.eval.total_num_envs=8", "eval.episodes=8", "video=none"),
    "env.eval.max_episode_steps=40",
)
MODELS = {
    "flow": ("env=gym", "env.id=Pendulum-v1", "model=flow_small", "model.num_images_in_input=0"),
    "openvla_oft": ("env=tabletop", "model=openvla_oft_tiny", "model.residual_scale=1"),
}
SMALL = (
    *("algorithm=sac", "env.train.total_num_envs=2", "env.train.max_steps_per_rollout_epoch=16"),
    *("actor.global_batch_size=16", "algorithm.learning_starts=16", "algorithm.updates_per_sample=0.5"),
    *("runner.max_steps=4", "runner.save_interval=2", "runner.val_check_interval=4", "checkpoint.keep=9"),
    *("env.train.continue_episodes=false", "actor.optim.lr=1e-2", "env.train.max_episode_steps=16"),
)


def played(folder: Path) -> list[tuple[float, int]]:
    rows = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    return [(row["return"], row["steps"]) for row in sorted(rows, key=lambda row: row["episode"])]


def tensors(run: Path, name: str) -> dict[str, bytes]:
    return {key: value.tobytes() for key, value in load_file(run / "checkpoints/step_000004" / name).items()}


@pytest.mark.integration
@pytest.mark.parametrize("model", MODELS)
def test_residual_policy_acts_identically_after_resume_and_export(model, tmp_path):
    same = (*MODELS[model], *SAME)
    where = f"runner.output_dir={tmp_path}"
    whole = train(load_config("train", [*same, *SMALL, where, "runner.experiment_name=whole"])).run
    at_first, validated = (played(whole / "eval" / f"step_00000{step}") for step in (0, 4))
    assert at_first != validated, "it learned nothing that changes an action"
    alone = evaluate(load_with_ckpt("eval", [*same, where, f"ckpt={whole}"]))
    assert played(alone.folder) == validated
    out = export(whole, 4, tmp_path / "exported")
    exported = evaluate(load_config("eval", [*same, where, f"model.path={out}"]))
    assert played(exported.folder) == validated
    started = load_config("train", [*same, *SMALL, where, "runner.experiment_name=half"])
    half = train(started, on_step=lambda step, _: step == 2).run
    train(load_saved_config(half, []), resume=half)
    assert played(half / "eval" / "step_000004") == validated
    saved = whole / "checkpoints/step_000004"
    names = [str(path.relative_to(saved)) for path in saved.glob("policy/*.safetensors")]
    for name in (*names, "critics.safetensors", "replay.safetensors"):
        assert tensors(half, name) == tensors(whole, name), name
