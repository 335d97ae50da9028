"""Callbacks receive every step and validation, and can end the run."""

from pathlib import Path

import numpy as np
import pytest
from toy_runs import rows, toy_config

import embodyrl


def test_step_callback_gets_logged_metrics_and_can_stop_the_run(tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []

    def on_step(step: int, metrics) -> bool:
        seen.append((step, metrics["train/return"]))
        return step == 2

    cfg = toy_config(tmp_path, "runner.max_steps=4", "runner.val_check_interval=-1")
    result = embodyrl.train(cfg, on_step=on_step)
    assert result.step == 2
    assert result.checkpoint.is_dir()
    assert seen == [(row["step"], row["train/return"]) for row in rows(result.run)]
    again = embodyrl.train(cfg, resume=result.run, on_step=lambda step, metrics: seen.append((step, 0.0)))
    assert (again.step, [step for step, _ in seen]) == (4, [1, 2, 3, 4])


def test_eval_callback_gets_results_and_can_stop_the_run(tmp_path: Path) -> None:
    seen: dict[int, float] = {}

    def on_eval(step: int, result) -> np.bool_:
        seen[step] = result.overall.mean_return
        return np.float64(len(seen)) == 2  # numpy's, as of a mean of returns

    result = embodyrl.train(
        toy_config(tmp_path, "runner.max_steps=4", "runner.val_check_interval=1", "eval.episodes=2"), on_eval=on_eval
    )
    assert result.step == 1
    assert seen == {row["step"]: row["eval/return"] for row in rows(result.run)}


@pytest.mark.parametrize("name", ["on_step", "on_eval"])
def test_failing_callback_saves_the_last_step(tmp_path: Path, name: str) -> None:
    def fail(step: int, news) -> None:
        if step == 2:
            raise KeyError("a key that is not there")

    cfg = toy_config(tmp_path, "runner.max_steps=4", "runner.val_check_interval=1", "eval.episodes=2")
    with pytest.raises(KeyError) as raised:
        embodyrl.train(cfg, **{name: fail})
    saved = tmp_path / "run" / "checkpoints" / "step_000002"
    assert raised.value.__notes__ == [f"raised by a callback of embodyrl.train after step 2; saved {saved}"]
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2]
    assert embodyrl.train(cfg, resume=tmp_path / "run").step == 4


def test_failing_sft_callback_saves_the_last_step(tmp_path: Path) -> None:
    def fail(step: int, metrics) -> None:
        if step == 3:
            raise KeyError("a key that is not there")

    (tmp_path / "rows.jsonl").write_text('{"question": "a?", "answer": "b"}\n' * 4)
    words = [f"data.path={tmp_path}/rows.jsonl", "data.prompt_key=question", "model=causal_lm_tiny", "launcher=inline"]
    places = [f"runner.output_dir={tmp_path}", "runner.experiment_name=run", "runner.logger.backends=[jsonl]"]
    small = ["runner.max_steps=5", "actor.global_batch_size=2", "actor.micro_batch_size=2", "data.val_share=0"]
    cfg = embodyrl.compose("sft", *words, *places, *small)
    with pytest.raises(KeyError) as raised:
        embodyrl.sft(cfg, on_step=fail)
    saved = tmp_path / "run" / "checkpoints" / "step_000003"
    assert raised.value.__notes__ == [f"raised by a callback of embodyrl.sft after step 3; saved {saved}"]
    assert embodyrl.sft(cfg, resume=tmp_path / "run").step == 5
