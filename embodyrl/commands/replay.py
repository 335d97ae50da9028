"""A dumped training step once more: log-probabilities, advantages and loss again, with the weights it began with."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from embodyrl.channels.arena import Arena, RecordState, read_observation, records_of
from embodyrl.channels.layout import STATE, Record
from embodyrl.channels.messages import LoadRequest, UpdateRequest
from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.cluster.protocol import LauncherSettings
from embodyrl.commands.dump import Dump, read_dump, weights_folder
from embodyrl.commands.run_folder import first_weights
from embodyrl.errors import CheckpointError, NonFiniteError
from embodyrl.monitor.history import read_rows
from embodyrl.plan.config import load_saved_config
from embodyrl.plan.roots import TrainConfig
from embodyrl.plan.run_plan import RunPlan, build_run_plan
from embodyrl.plan.settings import RolloutSettings
from embodyrl.scheduler.actors import ALGORITHM_FILE, gather_scores
from embodyrl.scheduler.start import policy_init
from embodyrl.types import BoolArray, FloatArray, IntArray
from embodyrl.workers.policy_host import PolicyHost

_TOLERANCE = {False: 1e-3, True: 0.1}
"""By whether it computes in bfloat16: of a log-probability, absolute, and of an update's metrics, relative."""
_ADVANTAGE_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The B samples of an update as they were dumped, and as they come out now."""

    weights: str
    """What it was computed with."""
    episode: IntArray
    chunk: IntArray
    """[B] place within the episode."""
    reset_id: IntArray
    version: IntArray
    """[B] of the weights that acted."""
    reward: FloatArray
    """[B]"""
    advantage: tuple[FloatArray, FloatArray]
    """[B, K] then and now; 0 where not executed, not a number where the sample is left out now."""
    logprob: tuple[FloatArray, FloatArray]
    """[B, L] then and now."""
    stale: BoolArray
    """[B] older weights acted: the probabilities may differ."""
    metrics: dict[str, tuple[float, float]]
    """Of the update, then and now."""
    problems: tuple[str, ...]
    """What does not agree, a line each."""


def replay(run: Path, step: int, *, overrides: Sequence[str] = ()) -> Replay:
    """Compute a dumped step of a run again, in this process.

    Args:
        run: run folder.
        step: a step with a dump.
        overrides: `trust=true` where the run's config names code.

    Raises:
        CheckpointError: the dump or its checkpoint is missing or damaged, or does not fit the run's config.
    """
    dump, weights = read_dump(run, step), weights_folder(run, step)
    run_plan = build_run_plan(_alone(load_saved_config(run, overrides)), training=True)
    algorithm, batch, episodes = run_plan.algorithm, dump.batch, dump.collection.episodes
    assert algorithm is not None
    if algorithm.needs_replay:
        raise CheckpointError(f"{run} learned from a buffer, which no dump holds; its steps cannot be repeated.")
    arena, tickets = _refill(run_plan, dump)
    host = _host(run_plan, arena, weights)
    try:
        if weights is not None:
            algorithm.load_state(json.loads((weights / ALGORITHM_FILE).read_text(encoding="utf-8")))
        scores = gather_scores(algorithm, arena, dump.collection, run_plan.env.component_weights)
        again = algorithm.prepare(episodes, scores)
        # Not a number where nothing was computed again, so that a missing chunk shows as different.
        advantage = np.full_like(arena[Record.advantage], np.nan)
        advantage[again.records] = again.advantage
        logprob = _logprobs(host, arena, batch.records, run_plan.config(TrainConfig).actor.micro_batch_size)
        try:
            now = _update(host, dump, tickets) if batch.has_signal else {}
            problems = []
        except NonFiniteError as error:
            now, problems = {}, [str(error)]
    finally:
        host.close()
        arena.close()
    then = next((row for row in read_rows(run / "metrics.jsonl") if row.get("step") == step), {})
    version = dump.fields[Record.version][batch.records]
    result = Replay(
        weights=str(weights or run_plan.cfg.ckpt or run_plan.cfg.model.weights or "none"),
        episode=batch.episode,
        chunk=np.concatenate([np.arange(len(e.records)) for e in episodes])[batch.records],
        reset_id=np.concatenate([np.full(len(e.records), e.spec.reset_id) for e in episodes])[batch.records],
        version=version,
        reward=dump.fields[Record.reward][batch.records].sum(axis=1),
        advantage=(batch.advantage, advantage[batch.records]),
        logprob=(dump.fields[Record.logprob][batch.records], logprob),
        stale=version < step - 1,
        metrics={name: (then[f"actor/{name}"], now[name]) for name in now if f"actor/{name}" in then},
        problems=tuple(problems),
    )
    return replace(result, problems=(*problems, *_differences(result, _TOLERANCE[run_plan.cfg.model.half])))


def gap(pair: tuple[FloatArray, FloatArray]) -> FloatArray:
    """[B] the largest difference within each sample."""
    return np.abs(pair[0] - pair[1]).max(axis=1, initial=0.0)


def _differences(result: Replay, tolerance: float) -> list[str]:
    wrong = {
        "advantages": ~(gap(result.advantage) <= _ADVANTAGE_TOLERANCE),
        "log-probabilities": ~(gap(result.logprob) <= tolerance) & ~result.stale,
    }
    lines = [f"the {name} of {int(found.sum())} of {found.size} chunks differ" for name, found in wrong.items()]
    return [line for line, found in zip(lines, wrong.values(), strict=True) if found.any()] + [
        f"the update's {name} was {a:.6g} and is {b:.6g}"
        for name, (a, b) in result.metrics.items()
        if not math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    ]


def _alone(cfg: TrainConfig) -> TrainConfig:
    """The same training in one process."""
    # In this process and whole, so that a debugger can stop in it.
    one_rank = cfg.actor.fsdp.updated({"size": 1, "shard_size": -1, "cpu_offload": False})
    launcher, rollout = LauncherSettings(name="inline"), RolloutSettings()
    return cfg.updated({"launcher": launcher, "rollout": rollout, "actor.fsdp": one_rank})


def _refill(run_plan: RunPlan, dump: Dump) -> tuple[Arena, IntArray]:
    """An arena whose records are the rows of the dump."""
    count = sum(len(episode.records) for episode in dump.collection.episodes)
    shapes = {f.name: (count, *f.shape) for f in run_plan.layout.fields}
    if shapes != {name: values.shape for name, values in dump.fields.items()}:
        raise CheckpointError(f"The dump of step {dump.step} does not fit the run's config.yaml; was that changed?")
    arena = Arena.create(run_plan.layout, count)
    tickets = arena.allocate_all(count)
    for name, values in dump.fields.items():
        arena[name][records_of(tickets)] = values
    # No env worker will write these, so they are declared readable.
    arena[STATE][:] = RecordState.READY
    # As they were then: the update is repeated with them, and the advantages compared by themselves.
    arena[Record.advantage][dump.batch.records] = dump.batch.advantage
    arena[Record.returns][dump.batch.records] = dump.batch.returns
    return arena, tickets


def _host(run_plan: RunPlan, arena: Arena, weights: Path | None) -> PolicyHost:
    first = first_weights(run_plan.cfg, run_plan.env)
    host = PolicyHost(policy_init(run_plan, arena, first))
    if weights is not None:
        CheckpointStore(weights.parent).verify(weights)
        (done,) = host.handle(LoadRequest(folder=str(weights)))
        if done.error:
            raise CheckpointError(done.error)
    return host


def _logprobs(host: PolicyHost, arena: Arena, records: IntArray, size: int) -> FloatArray:
    """[B, L] of the dumped tokens."""
    with torch.no_grad():
        parts = [
            host.policy.score(read_observation(arena, part), arena[Record.tokens][part]).logprob.float().cpu().numpy()
            for part in (records[start : start + size] for start in range(0, len(records), size))
        ]
    return np.concatenate([np.zeros((0, arena[Record.tokens].shape[1]), np.float32), *parts])


def _update(host: PolicyHost, dump: Dump, tickets: IntArray) -> dict[str, float]:
    request = UpdateRequest(
        step=dump.step - 1,
        tickets=tickets[dump.batch.records],
        episode=dump.batch.episode,
    )
    (done,) = host.handle(request)
    return done.metrics
