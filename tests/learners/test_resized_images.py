"""Updates read the images that inference has resized, with the same results as from camera images."""

import pytest
from toy_runs import comparable, weights

from embodyrl.channels.layout import build_record_layout
from embodyrl.commands.train import train
from embodyrl.devices import visible_gpus
from embodyrl.plan import build
from embodyrl.plan.config import load_config

WORDS = (
    *("env=tabletop", "model=openvla_oft_tiny", "model.precision=fp32", "launcher=inline", "algorithm=ppo"),
    *("env.init_params.camera_heights=80", "env.init_params.camera_widths=80", "env.train.total_num_envs=2"),
    *("env.train.max_episode_steps=16", "env.train.max_steps_per_rollout_epoch=16", "actor.global_batch_size=4"),
    *(
        "video=none",
        "actor.micro_batch_size=2",
        "runner.max_steps=2",
        "runner.deterministic=true",
        "runner.val_check_interval=-1",
    ),
    *("runner.experiment_name=run", "runner.logger.backends=[jsonl]"),
)


def plan_layout(words=()):
    return build.build_run_plan(load_config("train", [*WORDS, *words]), training=True).layout


def resized_shape(layout):
    (shape,) = [field.shape for field in layout.fields if field.name == "resized"]
    return shape


@pytest.mark.skipif(bool(visible_gpus()), reason="a GPU resizes the images of each update")
def test_updates_from_resized_images_equal_updates_from_camera_images(tmp_path, monkeypatch):
    assert resized_shape(plan_layout()) == (1, 56, 56, 3)
    runs = []
    for with_resized in (True, False):
        if not with_resized:
            monkeypatch.setattr(
                build, "build_record_layout", lambda *a, with_resized, **k: build_record_layout(*a, **k)
            )
        runs.append(train(load_config("train", [*WORDS, f"runner.output_dir={tmp_path}/{with_resized}"])).run)
    assert resized_shape(plan_layout()) == (0, 0, 0, 3), "the second run read camera images"
    assert weights(runs[0], 2) == weights(runs[1], 2)
    rows = [[{k: v for k, v in row.items() if "memory" not in k} for row in comparable(run)] for run in runs]
    assert rows[0] == rows[1]
    assert rows[0][-1]["actor/grad_norm"] > 0


def test_images_are_stored_once_if_the_policy_does_not_shrink_them():
    size = "env.init_params.camera_"
    assert resized_shape(plan_layout([f"{size}heights=56", f"{size}widths=56"])) == (0, 0, 0, 3)
    assert resized_shape(plan_layout(["model.image_pipeline=official"])) == (0, 0, 0, 3), "not repeatable"
