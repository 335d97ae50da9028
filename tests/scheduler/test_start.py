"""Settings of a process before it starts."""

import os
from contextlib import closing

import pytest
from toy_runs import TOY_OFT, toy_config

from embodyrl.channels.arena import Arena
from embodyrl.channels.messages import RankInfo
from embodyrl.errors import ConfigError
from embodyrl.files import available_cores
from embodyrl.plan.build import build_run_plan
from embodyrl.scheduler.start import build_policy_init, build_policy_specs, get_num_threads


@pytest.mark.parametrize(
    ("offload", "gpus", "all_cores"), [("true", "0", True), ("true", "", False), ("false", "0", False)]
)
def test_optimizer_steps_on_cpu_use_all_cores(tmp_path, monkeypatch, offload, gpus, all_cores):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cfg = toy_config(tmp_path, "launcher=local", "actor.fsdp.size=1", f"actor.fsdp.cpu_offload={offload}")
    run_plan = build_run_plan(cfg, training=True)
    with closing(Arena.create(run_plan.layout, 1)) as arena:
        assert build_policy_init(run_plan, arena, None).threads == (available_cores() if all_cores else 1)


UPDATES = (*TOY_OFT, "launcher=local", "actor.global_batch_size=8", "actor.micro_batch_size=8")


@pytest.mark.parametrize(
    ("overrides", "several"),
    [
        ((), True),
        (("launcher=inline",), True),
        (("runner.deterministic=true",), False),
        (("actor.fsdp.size=2",), False),
        (("algorithm.max_staleness=1",), False),
        (("rollout.mode=disaggregated",), False),
        (("actor.micro_batch_size=1",), False),
    ],
)
def test_updates_of_one_process_use_cores_that_env_workers_leave_idle(tmp_path, monkeypatch, overrides, several):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run_plan = build_run_plan(toy_config(tmp_path, *UPDATES, *overrides), training=True)
    cores = os.sched_getaffinity(0)

    def count_threads():
        init = build_policy_init(run_plan, arena, None)
        return init.threads, init.update_threads

    with closing(Arena.create(run_plan.layout, 1)) as arena:
        assert count_threads() == (1, available_cores() if several else 1)
        try:
            os.sched_setaffinity(0, {min(cores)})
            assert count_threads() == (1, 1)
        finally:
            os.sched_setaffinity(0, cores)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert count_threads() == (3, 3), "the user's number"


@pytest.mark.parametrize(("text", "number"), [("4", 4), ("4,2", 4), (" 3 , 1", 3), ("", 7)])
def test_number_of_threads_is_the_first_of_a_list(monkeypatch, text, number):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert get_num_threads(7) == number


@pytest.mark.parametrize("text", ["many", "0", ",2", "-1"])
def test_invalid_number_of_threads_is_reported(monkeypatch, text):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS='{text}' is not a number of threads"):
        get_num_threads(1)


GROWING, EXACT = "expandable_segments:True", "pinned_max_round_threshold_mb:8"


@pytest.mark.parametrize(
    ("words", "gpus", "given", "options"),
    [
        ((), "0", {}, GROWING),
        (("launcher=inline",), "0", {}, GROWING),
        (("actor.fsdp.cpu_offload=true",), "0", {}, f"{GROWING},{EXACT}"),
        (("rollout.vllm.enable_sleep_mode=true",), "0", {}, None),
        ((), "", {}, None),
        ((), "0", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_policy_processes_get_allocator_options(words, gpus, given, options, tmp_path, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"CUDA_VISIBLE_DEVICES": gpus} | given).items():
        monkeypatch.setenv(name, value)
    run_plan = build_run_plan(toy_config(tmp_path, "launcher=local", *words), training=True)
    with closing(Arena.create(run_plan.layout, 1)) as arena:
        (spec,) = build_policy_specs(run_plan, arena, None, bucket_arena=None, rank_info=RankInfo())
    assert spec.environ.get("PYTORCH_ALLOC_CONF") == options
