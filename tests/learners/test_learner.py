"""User-defined learners: one file, selected by its estimator."""

from __future__ import annotations

import pytest
from toy_runs import resume_toy, rows, train_toy, weights

from embodyrl.errors import ConfigError

OWN = ("algorithm.adv_type=own_update:REGRESSION",)


@pytest.mark.integration
@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_custom_learner_trains_saves_and_resumes(tmp_path, launcher):
    words = (*OWN, "algorithm.sharpness=2", f"launcher={launcher}", "runner.save_interval=1")
    run = train_toy(tmp_path, *words, "runner.max_steps=2")
    first, second = (row["actor/imitated"] for row in rows(run))
    assert 0 < first < second
    assert all(row["actor/grad_norm"] > 0 for row in rows(run))
    assert weights(run, 1) != weights(run, 2)
    resume_toy(run, "runner.max_steps=3")
    assert rows(run)[-1]["actor/imitated"] > second, "it went on counting"


def test_custom_learner_validates_its_keys(tmp_path, caplog):
    with pytest.raises(ConfigError, match=r"sharpness=-1"):
        train_toy(tmp_path, *OWN, "algorithm.sharpness=-1")
    train_toy(tmp_path, *OWN, "algorithm.loss_type=gspo")
    assert "algorithm.loss_type has no effect: this algorithm has its own update" in caplog.text
