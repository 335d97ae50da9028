"""Settings of a process before it starts."""

from contextlib import closing

import pytest
from toy_runs import toy_config

from embodyrl.channels.arena import Arena
from embodyrl.channels.messages import RankInfo
from embodyrl.files import available_cores
from embodyrl.plan.run_plan import build_run_plan
from embodyrl.scheduler.start import plan_hosts, policy_init


@pytest.mark.parametrize(
    ("offload", "gpus", "all_cores"), [("true", "0", True), ("true", "", False), ("false", "0", False)]
)
def test_optimizer_steps_on_cpu_use_all_cores(tmp_path, monkeypatch, offload, gpus, all_cores):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cfg = toy_config(tmp_path, "launcher=local", "actor.fsdp.size=1", f"actor.fsdp.cpu_offload={offload}")
    run_plan = build_run_plan(cfg, training=True)
    with closing(Arena.create(run_plan.layout, 1)) as arena:
        assert policy_init(run_plan, arena, None).threads == (available_cores() if all_cores else 1)


@pytest.mark.parametrize("offload", [False, True])
def test_cpu_offload_limits_rounding_of_pinned_allocations(offload, tmp_path):
    words = (f"actor.fsdp.cpu_offload={str(offload).lower()}", "launcher=local")
    run_plan = build_run_plan(toy_config(tmp_path, *words), training=True)
    arena = Arena.create(run_plan.layout, 1)
    try:
        (spec,) = plan_hosts(run_plan, arena, None, bucket_arena=None, rank_info=RankInfo())
    finally:
        arena.close()
    assert (spec.environ.get("PYTORCH_ALLOC_CONF") == "pinned_max_round_threshold_mb:8") is offload
