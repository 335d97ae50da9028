"""Resuming on several ranks: full weights are held by one rank only."""

from __future__ import annotations

import ctypes
import multiprocessing
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from settings import model_of
from torch import nn

from embodyrl.channels.messages import RankInfo
from embodyrl.learners.settings import FsdpSettings
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.scheduler.start import open_rendezvous
from embodyrl.types import ActionSpec, CameraSpec, EnvSpec

LAYERS, WIDTH = 32, 1024
_MMAP_THRESHOLD = -3
"""Parameter of `mallopt`: the C library returns blocks of n bytes and more to the system, as for larger weights."""
WHOLE = LAYERS * WIDTH**2 * 4


def build() -> nn.Module:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))


def peak(*, anew: bool = False) -> int:
    """Return the peak resident memory of this process in bytes; `anew`: since this call."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def resume(rank_info: RankInfo, file: Path) -> None:
    from embodyrl.learners.fsdp import ShardedRanks

    torch.set_num_threads(1)
    module = build()
    ranks = ShardedRanks(module, rank_info, FsdpSettings(), bfloat16=False, acts=False)
    before = peak(anew=True)
    with ranks.full_weights(write=True), torch.no_grad():
        for name, weight in load_file(file).items():
            module.get_parameter(name).copy_(weight)
    grown = peak() - before
    with ranks.full_weights(write=False):
        if rank_info.rank == 0:
            assert all(torch.equal(w, module.get_parameter(name)) for name, w in load_file(file).items())
    ranks.close()
    assert rank_info.rank == 0 or grown < WHOLE / 2, f"{grown} bytes more, of {WHOLE} of the whole weights"


def resume_text(rank_info: RankInfo, folder: Path) -> None:
    from embodyrl.learners.fsdp import ShardedRanks

    torch.set_num_threads(1)
    env = EnvSpec(
        name="t",
        action=ActionSpec(dim=1),
        tasks=("a",),
        states_per_task=(1,),
        cameras=CameraSpec(names=(), size=(0, 0)),
    )
    cfg = model_of(model_type="causal_lm_tiny", num_action_chunks=4)

    def build(seed: int):
        return POLICIES.get("causal_lm_tiny").build(cfg, PolicyRequest(env=env, device="cpu", seed=seed))

    saved, policy = build(1), build(2)
    saved.save(folder / str(rank_info.rank))
    ranks = ShardedRanks(policy.module, rank_info, FsdpSettings(), bfloat16=False, acts=False)
    with ranks.full_weights(write=True):
        policy.load_weights(folder / str(rank_info.rank))
    with ranks.full_weights(write=False):
        for name, weight in saved.module.named_parameters() if rank_info.rank == 0 else ():
            assert torch.equal(policy.module.get_parameter(name), weight), name
    ranks.close()


def on_two_ranks(work: Callable[[RankInfo, Path], None], path: Path) -> None:
    meeting = open_rendezvous(2, "127.0.0.1", timeout_s=400)
    info = replace(meeting.rank_info, world=2)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(replace(info, rank=rank), path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(500)
    meeting.close()
    assert [process.exitcode for process in processes] == [0, 0]


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_resuming_rank_never_holds_full_weights(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({f"{i}.weight": torch.full((WIDTH, WIDTH), float(i)) for i in range(LAYERS)}, file)
    on_two_ranks(resume, file)


def save(rank_info: RankInfo, folder: Path) -> None:
    from embodyrl.checkpoint.tensors import save_state
    from embodyrl.learners.fsdp import ShardedRanks

    torch.set_num_threads(1)
    # Else it keeps freed ones of these 4 MiB, sometimes as many as all of them together.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**17)
    module = build()
    ranks = ShardedRanks(module, rank_info, FsdpSettings(), bfloat16=False, acts=False)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    ctypes.CDLL(None).malloc_trim(0)  # what gradients leave free would be used first
    before = peak(anew=True)
    with ranks.full_weights(write=False):
        pass
    of_weights = peak() - before
    state = ranks.gather(optimizer.state_dict())
    if rank_info.rank == 0:
        save_state(folder, "state", state)
    grown = peak() - before
    ranks.close()
    assert rank_info.rank or abs(of_weights / WHOLE - 1) < 0.1, of_weights / WHOLE
    assert rank_info.rank or abs(grown / (2 * WHOLE) - 1) < 0.1, grown / WHOLE  # as `plan/memory.py` says
    assert rank_info.rank == 0 or grown < WHOLE / 4, grown / WHOLE


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_saving_gathers_weights_then_moments_on_one_rank(tmp_path):
    on_two_ranks(save, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_language_models_resume_on_two_ranks(tmp_path):
    on_two_ranks(resume_text, tmp_path)
