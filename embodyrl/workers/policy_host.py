"""Policy process with one copy of the weights, for inference, training, or both.

Inference reads observations in shared memory and writes actions, log-probabilities and values into the same records.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.channels.arena import Arena, read_observation
from embodyrl.channels.layout import Record, encode_reply
from embodyrl.channels.messages import (
    ContinueRequest,
    Done,
    ImitateRequest,
    InferRequest,
    LoadRequest,
    LoadWeightsRequest,
    PublishRequest,
    RankInfo,
    Request,
    SaveRequest,
    ScoreRequest,
    UpdateRequest,
    ValueRequest,
    WorkerReady,
)
from embodyrl.checkpoint.tensors import convert_write_errors
from embodyrl.errors import CheckpointError, NonFiniteError
from embodyrl.learners.policy_gradient import PolicyGradientLearner
from embodyrl.learners.precision import cast_to_bfloat16
from embodyrl.learners.protocol import Learner
from embodyrl.learners.ranks import Ranks
from embodyrl.learners.training import Trainer, UpdateGenerator
from embodyrl.policies.protocol import HasEngine, Policy, ResizesImages
from embodyrl.policies.tensors import seed_everything
from embodyrl.specs import GripperConvention, convert_gripper
from embodyrl.types import ROWS_AT_A_TIME, FloatArray, IntArray
from embodyrl.workers.building import build_learner, build_policy, casts_to_bfloat16, open_ranks
from embodyrl.workers.lifecycle import PolicyHostInit
from embodyrl.workers.noise import generate_token_noise
from embodyrl.workers.weights import describe_weights, load_bucket, publish


class PolicyHost:
    """Policy process with inference (`PolicyInference`), a learner, or both."""

    def __init__(self, init: PolicyHostInit) -> None:
        torch.set_num_threads(init.threads)
        seed_everything(init.seed, deterministic=init.deterministic)
        self._init = init
        self._arena = init.open_arena()
        self._bucket_arena = None if init.bucket_arena is None else Arena.attach(init.bucket_arena)
        self.policy = build_policy(init)
        self._rollout = PolicyInference(
            self.policy, self._arena, init.request.env.action.gripper, init.rank_info, single_step=init.single_step
        )
        self._ranks = Ranks(init.rank_info)
        self._trainer: Trainer | None = None
        self._learner: Learner | None = None
        self._update: UpdateGenerator[dict[str, float]] | None = None
        if init.trains:
            algorithm = None
            if init.algorithm is not None:
                algorithm = Algorithm(init.algorithm, init.longest_episode, self.policy.spec.scored)
            # Before the optimizer is created: it needs the shards, not the full weights.
            self._ranks = open_ranks(init, self.policy)
            self._trainer = Trainer(
                self.policy,
                init.actor,
                skips_nonfinite=init.skips_nonfinite,
                total_steps=init.total_steps,
                ranks=self._ranks,
                warmup=0 if algorithm is None else init.model.warmup_steps,
                value_rate=algorithm is not None,
            )
            self._learner = build_learner(init, self._trainer, self._arena, algorithm)
            self._ranks.reshard()
        elif self._bucket_arena is not None and casts_to_bfloat16(init, self.policy):
            # Inference-only process with copies of the actors' weights.
            cast_to_bfloat16(self.policy.module, sharded=init.sharded)

    def ready(self) -> WorkerReady:
        """Return the `WorkerReady` message, with a description of weights that are transferred between processes."""
        return WorkerReady(weights=() if self._bucket_arena is None else describe_weights(self.policy.module))

    def handle(self, request: Request) -> Iterator[Done]:
        """Execute one request and report its duration."""
        started = time.perf_counter()
        error = ""
        try:
            metrics = self._execute(request)
        # Report the error in the reply: the driver may continue without this checkpoint.
        except CheckpointError as problem:
            metrics, error = {}, str(problem)
        seconds = time.perf_counter() - started
        finished = metrics is not None
        yield Done(sequence=request.sequence, seconds=seconds, metrics=metrics or {}, error=error, finished=finished)

    def _execute(self, request: Request) -> dict[str, float] | None:
        """Execute a request; return metrics, or None if the update is not finished."""
        # Free the engine's GPU memory for log-probabilities and training until the next inference.
        if isinstance(request, ScoreRequest | UpdateRequest) and isinstance(self.policy, HasEngine):
            self.policy.free_engine_memory()
        match request:
            case InferRequest():
                self._rollout.infer(request)
            case ValueRequest():
                self._rollout.values(request)
            case ScoreRequest() if isinstance(self._learner, PolicyGradientLearner):
                self._learner.score(request)
            case UpdateRequest() | ImitateRequest() if self._learner is not None:
                self._update = self._learner.update(cast(Any, request))  # the learner accepts this kind of request
                return self._continue_update(in_parts=isinstance(request, UpdateRequest) and request.in_parts)
            case ContinueRequest():
                return self._continue_update(in_parts=True)
            case PublishRequest() if self._bucket_arena is not None:
                publish(request, self.policy.module, self._ranks, self._bucket_arena)
            case LoadWeightsRequest() if self._bucket_arena is not None:
                load_bucket(request, self.policy.module, self._bucket_arena)
            case SaveRequest() if self._trainer is not None:
                self._save(self._trainer, Path(request.folder))
            case LoadRequest() if self._trainer is not None:
                self._trainer.optimization.load(Path(request.folder), self.policy)
                if self._learner is not None:
                    self._learner.load(Path(request.folder))
            case _:
                raise AssertionError(f"this policy process does not support the request {request!r}")
        return {}

    def _continue_update(self, *, in_parts: bool) -> dict[str, float] | None:
        assert self._update is not None, "no update to continue"
        torch.set_num_threads(self._init.update_threads or self._init.threads)
        try:
            next(self._update)
            while not in_parts:
                next(self._update)
        except StopIteration as stop:
            self._update = None
            return stop.value
        finally:
            torch.set_num_threads(self._init.threads)
        return None

    def _save(self, trainer: Trainer, folder: Path) -> None:
        """Write the policy and the optimizer, then the algorithm's state; called by all ranks.

        Raises:
            CheckpointError: writing failed (full disk); all ranks have still run the collective operations.
        """
        try:
            trainer.optimization.save(folder, self.policy, self._init.request.env)
        finally:
            if self._learner is not None:
                with convert_write_errors(folder):
                    self._learner.save(folder)

    def close(self) -> None:
        """Leave the process group and close the shared memory; idempotent."""
        self._ranks.close()
        if self._learner is not None:
            self._learner.close()
        if self._bucket_arena is not None:
            self._bucket_arena.close()
        if self._init.shared_arena is None:
            self._arena.close()


@dataclass(frozen=True, slots=True)
class _RunningChunk:
    """A sampled chunk of an environment, from which one action per record is executed."""

    episode: int
    """Noise seed of the episode."""
    begin: int
    """Env step at which the chunk was sampled."""
    actions: FloatArray
    """[K, A] actions of the chunk."""


class PolicyInference:
    """Inference with a policy: computes action chunks and values. The learner may share the policy's module."""

    def __init__(
        self,
        policy: Policy,
        arena: Arena,
        gripper: GripperConvention | None,
        rank_info: RankInfo,
        *,
        single_step: bool = False,
    ) -> None:
        """Set up inference; with `single_step`, a chunk spans one record per action."""
        self._policy = policy
        self._rank_info = rank_info
        self._arena = arena
        self._gripper = gripper
        self._steps_per_chunk = policy.spec.num_action_chunks if single_step else 1
        self._running_chunks: dict[int, _RunningChunk] = {}

    def infer(self, request: InferRequest) -> None:
        """Compute one chunk per record reference and write it into the record of its observation.

        Raises:
            NonFiniteError: the policy's outputs are not finite. Tokens sampled from NaN look valid, so diverged weights
                are detected here even if no later update uses the tokens.
        """
        arena, policy = self._arena, self._policy
        steps = request.chunk_indices
        if self._steps_per_chunk > 1:
            request, steps = self._continue_chunks(request)
        if not len(request.record_refs):
            return
        records = arena.read(request.record_refs)
        # In a deterministic run each environment has a fixed row: results of a row depend on its position, too.
        rows = _get_batch_rows(request.rows, request.padded_size, len(records))
        noise = None
        if not request.greedy:
            noise = generate_token_noise(request.noise_seeds, request.chunk_indices, policy.spec.tokens_per_chunk)
            noise = _pad(noise, rows, request.padded_size)
        # Padding rows are copies of a real observation, so they are numerically harmless.
        observation = read_observation(arena, _pad(records, rows, request.padded_size))
        if arena[Record.resized].size:
            assert isinstance(policy, ResizesImages)
            observation = replace(observation, images=policy.resize(observation.images))
        output = policy.act(observation, noise=noise, temperature=request.temperature)
        actions, logprob, value = output.actions[rows], output.logprob[rows], output.value[rows]
        for quantity, values in (("action", actions), ("log-probability", logprob), ("value", value)):
            if not np.isfinite(values).all():
                raise NonFiniteError(
                    f"The policy produced a non-finite {quantity}. Likely cause: diverged weights (lower "
                    "actor.optim.lr, actor.optim.value_lr or actor.optim.clip_grad), or broken action statistics. "
                    "Older checkpoints are intact."
                )
        # After the check: the gripper conversion would hide a NaN.
        convert_gripper(actions, policy.spec.gripper, self._gripper)
        arena[Record.action][records] = actions
        if self._steps_per_chunk > 1:
            new_chunks = zip(request.rows, request.noise_seeds, steps, actions, strict=True)
            self._running_chunks |= {
                int(row): _RunningChunk(int(seed), int(step), chunk_actions)
                for row, seed, step, chunk_actions in new_chunks
            }
        arena[Record.tokens][records] = output.tokens[rows]
        arena[Record.logprob][records] = logprob
        arena[Record.value][records] = value
        arena[Record.version][records] = request.version
        if arena[Record.resized].size:
            arena[Record.resized][records] = observation.images[rows]
        arena[Record.cost][records] = 1 if output.cost is None else output.cost[rows]
        if width := arena[Record.reply].shape[1]:
            assert output.cut_off is not None
            arena[Record.reply][records] = np.stack([encode_reply(output.replies[row], width) for row in rows])
            arena[Record.cut_off][records] = output.cut_off[rows]
        if width := arena[Record.top].shape[1]:
            arena[Record.top][records] = np.stack([encode_reply(output.top[row], width) for row in rows])

    def _continue_chunks(self, request: InferRequest) -> tuple[InferRequest, IntArray]:
        """Write the next action of environments with a running chunk; return request and env steps of other rows."""
        remaining: list[int] = []
        entries = zip(request.rows, request.noise_seeds, request.chunk_indices, strict=True)
        for index, (row, seed, step) in enumerate(entries):
            running_chunk = self._running_chunks.get(int(row))
            steps_done = (
                0 if running_chunk is None or running_chunk.episode != int(seed) else int(step) - running_chunk.begin
            )
            if running_chunk is not None and 0 < steps_done < self._steps_per_chunk:
                (record,) = self._arena.read(request.record_refs[index : index + 1])
                self._arena[Record.action][record, 0] = running_chunk.actions[steps_done]
                for name in (Record.tokens, Record.logprob, Record.value):
                    self._arena[name][record] = 0  # clear values of the record's earlier content
            else:
                remaining.append(index)
        selected = {
            name: np.asarray(getattr(request, name))[remaining] for name in ("record_refs", "noise_seeds", "rows")
        }
        steps = np.asarray(request.chunk_indices)[remaining]
        # The noise depends on the index of the chunk, as in an evaluation.
        return replace(request, chunk_indices=steps // self._steps_per_chunk, **selected), steps

    def values(self, request: ValueRequest) -> None:
        """Compute the values of final observations for bootstrapping, and write the values into the records."""
        size = request.padded_size or ROWS_AT_A_TIME
        for part in self._rank_info.get_slices(len(request.record_refs), size):
            records = self._arena.read(request.record_refs[part])
            rows = np.arange(len(records))
            padded = _pad(records, rows, request.padded_size)
            self._arena[Record.value][records] = self._policy.values(read_observation(self._arena, padded))[rows]


def _get_batch_rows(requested: Sequence[int] | IntArray, padded_size: int, count: int) -> IntArray:
    if not padded_size:
        return np.arange(count)
    rows = np.asarray(requested, dtype=np.int64)
    assert len(np.unique(rows)) == count, f"two record references have the same row: {requested}"
    assert rows.max() < padded_size, f"row {rows.max()} of {padded_size}"
    return rows


def _pad(values: np.ndarray, rows: IntArray, padded_size: int) -> np.ndarray:
    """Place `values` at the given rows of a padded batch; the other rows repeat the first value."""
    if not padded_size:
        return values
    padded = np.repeat(values[:1], padded_size, axis=0)
    padded[rows] = values
    return padded
