"""Labels decide what a policy learns: true labels separate good from bad actions, shuffled ones do not."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import wait_until
from settings import model_of
from test_conditioning import policy

from embodyrl.commands.recap_labelling import Stage, label_in_process
from embodyrl.data.labels import Labels, get_frame_indices, read_positive
from embodyrl.data.recap.settings import RecapSettings
from embodyrl.errors import ConfigError, WorkerError
from embodyrl.policies.vla.conditioning import NEGATIVE, POSITIVE, Conditioning, add_suffix
from embodyrl.process_cleanup import list_remaining_children
from embodyrl.types import FloatArray, Observation

WORDS = "touch the red block"


def observations(count: int, suffixes: list[str]) -> Observation:
    return Observation(
        images=np.zeros((count, 1, 56, 56, 3), np.uint8),
        state=np.zeros((count, 4), np.float32),
        instructions=tuple(add_suffix(WORDS, suffix) for suffix in suffixes),
    )


def learned(*, shuffled: bool) -> dict[str, float]:
    """Train on actions of +0.5 (good) and -0.5 (bad) in the same state; return the mean first action per suffix."""
    one = policy("flow_small")
    shape = (one.spec.num_action_chunks, one.spec.action_dim)
    optimizer = torch.optim.Adam(one.module.parameters(), lr=2e-3)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    for _ in range(60):
        good = rng.random(16) < 0.5
        actions: FloatArray = np.broadcast_to(np.where(good, 0.5, -0.5)[:, None, None], (16, *shape)).astype(np.float32)
        shown = rng.permutation(good) if shuffled else good
        suffixes = [
            "" if rng.random() < 0.3 else POSITIVE if positive else NEGATIVE for positive in shown
        ]  # fmt: skip
        loss = one.imitate(observations(16, suffixes), actions).loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = {}
    noise = np.random.default_rng(1).random((32, one.spec.tokens_per_chunk)).astype(np.float32)
    for name, suffix in (("positive", POSITIVE), ("negative", NEGATIVE)):
        one.conditioning = Conditioning(suffix=suffix, guidance=1.0)
        found[name] = float(one.act(observations(32, [""] * 32), noise=noise).actions[..., 0].mean())
    return found


@pytest.mark.slow
def test_shuffled_labels_do_not_improve_the_policy():
    """With true labels the suffix selects the good actions; with shuffled labels both suffixes act alike."""
    true, control = learned(shuffled=False), learned(shuffled=True)
    assert true["positive"] > 0.3
    assert true["negative"] < -0.3
    assert abs(control["positive"] - control["negative"]) < 0.2


def test_labels_of_other_data_are_refused(tmp_path: Path):
    from test_targets import demos

    found = demos()
    episode, frame = get_frame_indices(found)
    nothing = np.zeros(15, np.float32)
    path = tmp_path / "labels.parquet"
    positive = np.arange(15) % 2 == 0
    Labels(
        episode=episode, frame=frame, returns=nothing, value=nothing, advantage=nothing, positive=positive
    ).save(path)  # fmt: skip
    assert read_positive(path, found).tolist() == positive.astype(int).tolist()
    with pytest.raises(ConfigError, match=r"15 labelled frames, which do not match the 10 frames"):
        read_positive(path, demos((5, 5), (True, False)))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_positive(tmp_path / "missing.parquet", found)


def test_killed_value_stage_is_a_worker_error(tmp_path: Path):
    files = {"labels": tmp_path / "labels.parquet", "summary": tmp_path / "summary.json"}
    stage = Stage(
        folders=(), cfg=RecapSettings(out=str(tmp_path)), model=model_of(model_type="flow_small"), seed=0, **files
    )

    def kill() -> None:
        assert wait_until(list_remaining_children, 60)
        for pid in list_remaining_children():
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerError, match=r"value stage .* failed: killed by SIGKILL. To resume, run"):
        label_in_process(stage)
    killer.join()


def test_labels_of_data_sets_in_another_order_are_refused(tmp_path: Path):
    from test_targets import demos

    found, path = demos((6, 4), (True, True)), tmp_path / "labels.parquet"
    nothing, (episode, frame) = np.zeros(10, np.float32), get_frame_indices(found)
    assert frame.tolist() == [*range(6), *range(4)]
    Labels(
        episode=episode, frame=frame, returns=nothing, value=nothing, advantage=nothing, positive=nothing > 0
    ).save(path)  # fmt: skip
    with pytest.raises(ConfigError, match="in the order in which"):
        read_positive(path, demos((4, 6), (True, True)))
