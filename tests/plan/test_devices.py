"""Every spawned process sees the GPUs that the plan deals it, and no other."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from toy_runs import toy_config

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import bucket_layout
from embodyrl.channels.messages import RankInfo
from embodyrl.cluster.local import LocalLauncher
from embodyrl.devices import deal_devices, visible_gpus
from embodyrl.plan.blueprint import count_env_workers, draw_blueprint
from embodyrl.scheduler.start import env_spec, plan_hosts

APART = ("launcher=local", "rollout.mode=disaggregated", "rollout.num_workers=1", "launcher.env_workers=2")


@pytest.mark.parametrize(
    ("gpus", "policies", "acting", "drawing"),
    [
        ("", 2, "", ""),
        ("0", 2, "00", "0"),
        ("0123", 4, "0123", "0123"),
        ("0123", 1, "0", "123"),
        ("57", 3, "575", "57"),
    ],
)
def test_simulators_get_what_is_left_or_share_all(gpus, policies, acting, drawing):
    devices = deal_devices(gpus, policies)
    assert ("".join(devices.policies), "".join(devices.simulators)) == (acting, drawing)


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("2, 3", ("2", "3")), ("", ()), ("-1,0", ()), ("1,-1,2", ("1",)), ("GPU-ab,MIG-c", ("GPU-ab", "MIG-c"))],
)
def test_gpus_are_counted_as_cuda_counts_them(visible, gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == gpus


def seen_by_processes(folder, blueprint):
    """What the processes of a run find in CUDA_VISIBLE_DEVICES, started from its plan with a light worker inside."""
    arena = Arena.create(blueprint.layout, 1)
    bucket_arena = Arena.create(bucket_layout(), 2) if blueprint.is_disaggregated else None
    specs = plan_hosts(blueprint, arena, None, bucket_arena=bucket_arena, rank_info=RankInfo())
    specs += [env_spec(blueprint, arena, number) for number in range(len(blueprint.env_workers))]
    launcher, seen = LocalLauncher(folder), {}
    try:
        for spec in specs:
            launcher.start(replace(spec, entry="light_worker:LightWorker", init=""), timeout_s=60)
            launcher.send(spec.name, "gpus", timeout_s=60)
        deadline = time.monotonic() + 60
        while len(seen) < len(specs) and time.monotonic() < deadline:
            seen |= {event.worker: event.message for event in launcher.wait(1.0) if event.message != "ready"}
    finally:
        launcher.stop()
        for pool in (arena, bucket_arena):
            if pool is not None:
                pool.close()
    return seen


@pytest.mark.integration
def test_each_process_sees_the_gpu_of_its_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    blueprint = draw_blueprint(toy_config(tmp_path, *APART, "actor.fsdp.size=2"), training=True)
    seen = seen_by_processes(tmp_path, blueprint)
    assert seen == {"policy": "3", "policy_1": "5", "rollout_0": "6", "env_0": "7", "env_1": "7"}
    blind = replace(blueprint, env=replace(blueprint.env, on_gpu=False))
    assert seen_by_processes(tmp_path, blind) == seen | {"env_0": "", "env_1": ""}


def test_one_gpu_is_shared_and_none_is_hidden_on_a_host_without(tmp_path, monkeypatch):
    for visible, gpu in (("4", "4"), ("", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        devices = draw_blueprint(toy_config(tmp_path, *APART), training=True).devices
        assert [devices.of_policy(0), devices.of_policy(1), devices.of_env_worker(1, on_gpu=None)] == [gpu] * 3


def test_a_batched_simulator_gets_one_worker_per_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("embodyrl.plan.blueprint.available_cores", lambda: 16)
    cfg, env = toy_config(tmp_path, "launcher=local"), draw_blueprint(toy_config(tmp_path), training=True).env
    batched = replace(env, lockstep=True, on_gpu=True)
    workers = [count_env_workers(cfg, batched, deal_devices("0123"[:gpus], 1), 64) for gpus in (0, 1, 2, 4)]
    assert workers == [1, 1, 1, 3], "GPUs without a policy process come first"
    assert count_env_workers(cfg, batched, deal_devices("01", 2), 64) == 2
    assert count_env_workers(cfg, env, deal_devices("01", 2), 64) == 16


def test_an_average_of_weights_is_kept_on_all_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    words = ("launcher=local", "algorithm=filtered_bc", "algorithm.average=0.9", "actor.fsdp.size=-1")
    assert draw_blueprint(toy_config(tmp_path, *words), training=True).ranks == 2
