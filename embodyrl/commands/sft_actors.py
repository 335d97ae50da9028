"""Start of the training processes (actor ranks) of SFT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embodyrl.channels.arena import Arena
from embodyrl.channels.messages import SaveRequest
from embodyrl.cluster import LAUNCHERS
from embodyrl.cluster.protocol import OnNonfinite
from embodyrl.cluster.supervisor import Supervisor
from embodyrl.commands.sft_data import action_log_std
from embodyrl.commands.sft_setup import SftInputs
from embodyrl.data.samples import Samples
from embodyrl.files import available_cores
from embodyrl.plan.build import count_ranks, plan_devices
from embodyrl.plan.schema import Config
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.scheduler.event_loop import EventLoop, PolicyClient
from embodyrl.scheduler.start import (
    Progress,
    RunningWorkers,
    build_actor_specs,
    get_num_threads,
    get_shared_arena,
    open_rendezvous,
)
from embodyrl.types import IntArray
from embodyrl.workers.lifecycle import PolicyHostInit


@dataclass(frozen=True, slots=True, kw_only=True)
class SftActors(RunningWorkers):
    """Running actor ranks of an SFT run; the driver passes samples through shared memory (the arena)."""

    loop: EventLoop

    def save(self, folder: Path) -> None:
        """Save the policy and the training state to `folder`."""
        self.loop.call(SaveRequest(folder=str(folder)))

    @contextmanager
    def write_samples(self, samples: Samples, rows: IntArray) -> Iterator[IntArray]:
        """Write the samples `rows` to arena records; yield their references, which are freed after the `with` block."""
        rows = (rows[:, None] * samples.steps_per_sample + np.arange(samples.steps_per_sample)).ravel()
        record_refs = self.arena.allocate_all(len(rows))
        # Written by the driver, which loads the data set: there is no env worker.
        with self.arena.write_all(record_refs) as records:
            for record, row in zip(records.tolist(), rows.tolist(), strict=True):
                samples.write(self.arena, record, row)
        yield record_refs
        self.arena.free(record_refs)


def start_sft_actors(
    cfg: Config,
    inputs: SftInputs,
    *,
    total_steps: int,
    log_dir: Path,
    write_line: Callable[[str], None],
    progress: Progress,
) -> SftActors:
    """Start the actor ranks of an SFT run, and wait until they are ready.

    Args:
        cfg: config of the run.
        inputs: training data, and model with the statistics of the data.
        total_steps: training steps of the run.
        log_dir: folder for the ranks' logs.
        write_line: function that prints a line for the user.
        progress: function that is called while the ranks start.

    Raises:
        WorkerError: a rank could not start.
    """
    ranks, faults = count_ranks(cfg), cfg.faults
    # The samples of one optimizer step.
    capacity = inputs.train.steps_per_sample * cfg.actor.global_batch_size
    arena = Arena.create(inputs.layout, capacity, "Lower actor.global_batch_size.")
    launcher = LAUNCHERS.get(cfg.launcher.name)(log_dir, cfg.cluster)
    supervisor = Supervisor(launcher, faults, write_line)
    rendezvous = open_rendezvous(ranks, launcher.host, timeout_s=24 * faults.update_timeout_s)
    request = PolicyRequest(
        env=inputs.env,
        device="auto",
        seed=cfg.seed,
        gradient_checkpointing=cfg.actor.gradient_checkpointing,
        fresh_heads=True,
        value_dim=int(cfg.objective.trains_reward_model),
        action_log_std=action_log_std(inputs.train, inputs.env),
    )
    init = PolicyHostInit(
        model=inputs.model,
        objective=cfg.objective,
        actor=cfg.actor,
        seed=cfg.seed,
        deterministic=cfg.runner.deterministic,
        skips_nonfinite=faults.on_nonfinite is OnNonfinite.skip,
        request=request,
        arena=arena.handle,
        total_steps=total_steps,
        threads=get_num_threads(max(1, available_cores() // ranks)),
        acts=False,
        trains=True,
        shared_arena=get_shared_arena(cfg, arena),
    )
    specs = build_actor_specs(init, ranks, rendezvous.rank_info, plan_devices(cfg, training=True))
    policy = PolicyClient(supervisor, specs, timeout_s=faults.update_timeout_s)
    loop = EventLoop(supervisor, policy)
    actors = SftActors(supervisor=supervisor, arena=arena, policy=policy, loop=loop, rendezvous=rendezvous)
    actors.wait_until_ready(loop, specs, {}, progress)
    return actors
