"""The LIBERO variant with wrong instructions that documented results refer to."""

from __future__ import annotations

import pytest

from embodyrl.envs.protocol import instruction_for
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config


def test_variant_with_wrong_instructions_has_the_states_of_the_original(tmp_path):
    pytest.importorskip("libero.libero")
    words = ["env=libero_spatial", "model=openvla_oft_tiny", f"runner.output_dir={tmp_path}"]
    honest, liar = (
        build_run_plan(load_config("eval", [*words, *more]), training=False).env
        for more in ((), ("env.env_type=libero_liar:FACTORY", "trust=true"))
    )
    assert honest.states_per_task == liar.states_per_task
    for task in range(10):
        state = honest.get_reset_ids(task)[3]
        assert (
            instruction_for(liar, state)
            == instruction_for(honest, honest.get_reset_ids((task + 1) % 10)[3])
            != instruction_for(honest, state)
        )
