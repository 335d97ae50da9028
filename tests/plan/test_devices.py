"""Every spawned process gets only the GPUs of its plan."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from gpu_host import H100, of_size, stub_nvidia_smi
from toy_runs import toy_config

from embodyrl import devices
from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import build_bucket_layout
from embodyrl.channels.messages import RankInfo
from embodyrl.cluster.local import LocalLauncher
from embodyrl.devices import Gpus, assign_devices, visible_gpus
from embodyrl.plan.build import build_run_plan, count_env_workers
from embodyrl.scheduler.start import build_env_spec, build_policy_specs
from embodyrl.types import SimulatorSpec

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
def test_simulators_use_the_remaining_gpus_or_share_all(gpus, policies, acting, drawing):
    dealt = assign_devices(gpus, num_policies=policies)
    assert ("".join(dealt.policies), "".join(dealt.simulators)) == (acting, drawing)


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("2, 3", ("2", "3")),
        ("", ()),
        ("-1,0", ()),
        ("1,-1,2", ("1",)),
        ("GPU-ab,MIG-c", ("GPU-ab", "MIG-c")),
        ("NoDevFiles", ()),
        ("0,none,1", ("0",)),
        ("all", ()),
    ],
)
def test_gpu_count_follows_cuda_visible_devices(visible, gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == gpus


def test_wsl_uses_the_gpus_listed_by_the_driver(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "DEV", tmp_path)
    stub_nvidia_smi(tmp_path, monkeypatch, *of_size(1000, 1000))
    assert visible_gpus() == ()
    (tmp_path / "dxg").touch()
    assert visible_gpus() == ("0", "1")
    (tmp_path / "nvidia0").touch()
    assert visible_gpus() == ("0",)


DISPLAY = ("1", "GPU-b", "4096", "4096", "[N/A]", "580.65.06", "NVIDIA T400")
SPLIT = ("0", "GPU-a", "81559", "81559", "Enabled", "580.65.06", "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("visible", "rows", "mib"),
    [
        ("0", [H100, DISPLAY], 81559),
        ("1", [H100, DISPLAY], 4096),
        ("0,1", [H100, DISPLAY], 4096),
        ("GPU-b", [H100, DISPLAY], 4096),
        ("2", [H100, DISPLAY], 0),
        ("", [H100], 0),
        ("0", [], 0),
        ("0", [SPLIT], 9000),
        ("MIG-1", [SPLIT], 9000),
    ],
)
def test_free_memory_covers_only_visible_gpus(visible, rows, mib, tmp_path, monkeypatch):
    stub_nvidia_smi(tmp_path, monkeypatch, *rows)
    cuda = "class cuda:\n    device_count = lambda: 1\n    mem_get_info = lambda number: (9000 * 2**20, 0)\n"
    (tmp_path / "torch.py").write_text(cuda)  # which sees slices of a GPU as devices
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Gpus().free == mib * 2**20


def test_free_memory_of_mixed_gpus_uses_cuda_order(tmp_path, monkeypatch):
    stub_nvidia_smi(tmp_path, monkeypatch, DISPLAY, H100)
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    device_count = lambda: 1\n    mem_get_info = lambda n: (7, 7)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert Gpus().free == 7


def seen_by_processes(folder, run_plan):
    """Return CUDA_VISIBLE_DEVICES of the processes of a run, started from its plan with a light worker."""
    arena = Arena.create(run_plan.layout, 1)
    bucket_arena = Arena.create(build_bucket_layout(), 2) if run_plan.is_disaggregated else None
    specs = build_policy_specs(run_plan, arena, None, bucket_arena=bucket_arena, rank_info=RankInfo())
    specs += [build_env_spec(run_plan, arena, number) for number in range(len(run_plan.env_workers))]
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
def test_each_process_gets_its_planned_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    run_plan = build_run_plan(toy_config(tmp_path, *APART, "actor.fsdp.size=2"), training=True)
    seen = seen_by_processes(tmp_path, run_plan)
    assert seen == {"policy": "3", "policy_1": "5", "rollout_0": "6", "env_0": "7", "env_1": "7"}
    blind = replace(run_plan, env=replace(run_plan.env, simulator=SimulatorSpec(on_gpu=False)))
    assert seen_by_processes(tmp_path, blind) == seen | {"env_0": "", "env_1": ""}


def test_single_gpu_is_shared_and_cpu_hosts_hide_no_gpu(tmp_path, monkeypatch):
    for visible, gpu in (("4", "4"), ("", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        dealt = build_run_plan(toy_config(tmp_path, *APART), training=True).devices
        assert [dealt.get_policy_gpu(0), dealt.get_policy_gpu(1), dealt.get_env_worker_gpu(1, on_gpu=None)] == [gpu] * 3


def test_batched_simulator_has_one_worker_per_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("embodyrl.plan.build.available_cores", lambda: 16)
    cfg, env = toy_config(tmp_path, "launcher=local"), build_run_plan(toy_config(tmp_path), training=True).env
    batched = replace(env, simulator=SimulatorSpec(lockstep=True, on_gpu=True))
    workers = [count_env_workers(cfg, batched, assign_devices("0123"[:gpus], 1), 64) for gpus in (0, 1, 2, 4)]
    assert workers == [1, 1, 1, 3], "GPUs without a policy process come first"
    assert count_env_workers(cfg, batched, assign_devices("01", 2), 64) == 2
    assert count_env_workers(cfg, env, assign_devices("01", 2), 64) == 16


def test_weight_averaging_supports_several_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    words = ("launcher=local", "algorithm=filtered_bc", "algorithm.average=0.9", "actor.fsdp.size=-1")
    assert build_run_plan(toy_config(tmp_path, *words), training=True).ranks == 2
