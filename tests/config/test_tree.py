"""Suites derived from names."""

from pathlib import Path

from embodyrl.cli.output import get_help
from embodyrl.config import compose
from embodyrl.plan.config import load_config
from embodyrl.plan.saved import save_config


def test_perturbed_suite_settings_are_derived_from_the_name() -> None:
    found = compose.options("env")
    names = [name for name in found if name.startswith(("libero_pro_", "libero_plus_"))]
    assert len(names) == 32
    assert get_help("env", "libero_pro_goal_swap", found["libero_pro_goal_swap"]).startswith("LIBERO-PRO: libero_goal")
    env = load_config("eval", ["env=libero_plus_object_robot"]).env
    assert (env.task_suite_name, env.eval.max_episode_steps) == ("libero_object_robot", 240)


def test_perturbed_suite_can_replace_the_suite_of_a_run(tmp_path: Path) -> None:
    save_config(load_config("train", ["env=libero_object"]), tmp_path / "config.yaml")
    env = load_config("eval", ["env=libero_pro_object_swap"], base=tmp_path / "config.yaml").env
    assert (env.task_suite_name, env.eval.state_ids) == ("libero_object_swap", [0, 9])
