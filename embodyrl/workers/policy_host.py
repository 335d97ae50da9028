"""One process that holds one copy of the weights: a rollout worker, a learner, or both on the same module.

New weights go from actor ranks to processes that only act through shared memory, a bucket at a time.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import cast

import torch
from torch import Tensor, nn

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import BUCKET, WeightInfo, WeightPart
from embodyrl.channels.messages import (
    ContinueRequest,
    Done,
    ImitateRequest,
    InferRequest,
    LoadRequest,
    LoadWeightsRequest,
    PublishRequest,
    Request,
    SaveRequest,
    ScoreRequest,
    UpdateRequest,
    ValueRequest,
    WorkerReady,
)
from embodyrl.checkpoint.tensors import writing
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.learners.imitation import ImitationLearner
from embodyrl.learners.policy_gradient import PolicyGradientLearner
from embodyrl.learners.precision import halve
from embodyrl.learners.protocol import Learner, LearnerContext
from embodyrl.learners.settings import ActorSettings, Objective
from embodyrl.learners.training import InParts, Ranks, Trainer
from embodyrl.policies.critic import WithCritic
from embodyrl.policies.protocol import POLICIES, HasEngine, Policy, PolicyRequest, TextPolicy, weights_changed
from embodyrl.policies.settings import ModelSettings
from embodyrl.policies.tensors import best_device, seed_everything
from embodyrl.workers.lifecycle import PolicyHostInit
from embodyrl.workers.rollout_worker import RolloutWorker


class PolicyHost:
    """Rollout worker and learner, as far as the process has both."""

    def __init__(self, init: PolicyHostInit) -> None:
        torch.set_num_threads(init.threads)
        seed_everything(init.seed, deterministic=init.deterministic)
        self._init = init
        self._arena = init.open_arena()
        self._bucket_arena = None if init.bucket_arena is None else Arena.attach(init.bucket_arena)
        self.policy = self._build()
        self._rollout = RolloutWorker(
            self.policy, self._arena, init.request.env.gripper, init.rank_info, single_step=init.single_step
        )
        self._ranks: Ranks = Ranks(init.rank_info)
        self._trainer: Trainer | None = None
        self._learner: Learner | None = None
        self._imitation: ImitationLearner | None = None
        half = init.model.half
        if init.bucket_arena is not None and not init.trains and half and self._trains_all:
            # It only acts, on copies of what the actors keep: in their compute precision that is the same function.
            halve(self.policy.module, sharded=init.sharded)
        self._update: InParts[dict[str, float]] | None = None
        if init.trains:
            algorithm = None if init.algorithm is None else Algorithm(init.algorithm, init.longest_episode)
            # Before the optimizer is made: it has to hold the shards, not the whole weights.
            self._ranks = self._open_ranks(half=half)
            reference = None
            if init.objective.name is Objective.dpo if algorithm is None else algorithm.needs_reference:
                said = init.objective if algorithm is None else algorithm.settings
                # After the policy was sharded, so that two whole models are never in the memory of a GPU at once.
                url = getattr(said, "reference_url", None)
                reference = self._build_reference(said.reference_path) if url is None else self._served(url)
                reference.module.requires_grad_(False)
            self._trainer = Trainer(
                self.policy,
                init.actor,
                skips_nonfinite=init.skips_nonfinite,
                total_steps=init.total_steps,
                ranks=self._ranks,
                warmup=0 if algorithm is None else self.policy.spec.warmup_steps,
            )
            if algorithm is None:
                self._imitation = ImitationLearner(self._trainer, self._arena, init.objective, reference)
            else:
                assert isinstance(init.actor, ActorSettings)
                context = LearnerContext(
                    trainer=self._trainer,
                    arena=self._arena,
                    algorithm=algorithm,
                    actor=init.actor,
                    seed=init.seed,
                    env=init.request.env,
                    judge=init.env,
                    reference=reference,
                )
                self._learner = resolve_name(algorithm.learner)(context)
            self._ranks.reshard()

    def _build(self) -> Policy:
        model, request = self._init.model, replace(self._init.request, device=best_device())
        if self._init.critic is None:
            policy = POLICIES.get(model.model_type).build(model, request)
        else:
            policy = self._build_apart(model, request, self._init.critic)
        if self._init.start_from is not None:
            policy.load_weights(Path(self._init.start_from))
        return policy

    def _build_apart(self, model: ModelSettings, request: PolicyRequest, path: str) -> Policy:
        """The policy, and a critic whose weights are all trained."""
        factory = POLICIES.get(model.model_type)
        # A critic has no adapters: its weights are all trained, and its folder holds it whole.
        alone = {"is_lora": False} if model.adapted else {}
        critic = factory.build(model.updated({"path": path, **alone}), replace(request, backend="hf"))
        return WithCritic(factory.build(model, replace(request, value_dim=0)), critic, path)

    def _served(self, url: str) -> Policy:
        """What a server says of the policy's tokens."""
        assert self._init.algorithm is not None
        policy = cast(TextPolicy, getattr(self.policy, "alone", self.policy))
        return cast(Policy, policy.served_by(url, self._init.algorithm.reference_model))

    def _build_reference(self, path: str | None) -> Policy:
        """The policy at the start, or another one, for example a larger teacher, which must speak the same tokens.

        It is kept in the precision it computes in, which is the same function.
        """
        if path is None:
            whole = self._build()
            reference = getattr(whole, "alone", whole)  # values are nobody's reference
            if self._init.model.half and self._trains_all:
                halve(reference.module, sharded=self._is_sharded)
            return reference
        alone = {"is_lora": False} if self._init.model.adapted else {}
        model = self._init.model.updated({"path": path, **alone})
        request = replace(self._init.request, device=best_device(), trainable=False, backend="hf")
        reference = POLICIES.get(model.model_type).build(model, request)
        reference.load_weights(Path(path))
        own, other = (getattr(policy, "vocabulary", None) for policy in (self.policy, reference))
        if own != other:
            raise ConfigError(
                f"algorithm.reference_path={path}: its tokenizer, or the statistics whose bins its action tokens are, "
                "are not the policy's: its probabilities are of other tokens. Use a model of the same family and data."
            )
        return reference

    @property
    def _trains_all(self) -> bool:
        """Weights are float32; beside adapters, or steered, they are in half already, and what is trained stays."""
        return not self._init.model.adapted and not self.policy.spec.steers

    @property
    def _is_sharded(self) -> bool:
        return self._init.rank_info.world > 1 or self._init.actor.fsdp.cpu_offload

    def _open_ranks(self, *, half: bool) -> Ranks:
        """Bind the module to the ranks of the run; collective."""
        init, fsdp = self._init, self._init.actor.fsdp
        if not self._is_sharded:
            return Ranks(init.rank_info)
        from embodyrl.learners.sharded import ShardedRanks  # FSDP takes more than a second to import

        return ShardedRanks(self.policy.module, init.rank_info, fsdp, half=half, acts=init.acts)

    def ready(self) -> WorkerReady:
        """Introduce the worker."""
        return WorkerReady(weights=() if self._bucket_arena is None else describe_weights(self.policy.module))

    def handle(self, request: Request) -> Iterator[Done]:
        """Carry out one request and report how long it took."""
        started = time.perf_counter()
        error = ""
        try:
            metrics = self._carry_out(request)
        # An answer and not the end of the worker: whoever asked may go on without this checkpoint.
        except CheckpointError as problem:
            metrics, error = {}, str(problem)
        seconds = time.perf_counter() - started
        finished = metrics is not None
        yield Done(sequence=request.sequence, seconds=seconds, metrics=metrics or {}, error=error, finished=finished)

    def _carry_out(self, request: Request) -> dict[str, float] | None:
        """Return metrics, or None if this was a part only."""
        # The engine's memory on the GPU is for scoring and training until somebody acts again.
        if isinstance(request, ScoreRequest | UpdateRequest) and isinstance(self.policy, HasEngine):
            self.policy.rest()
        match request:
            case InferRequest():
                self._rollout.infer(request)
            case ValueRequest():
                self._rollout.values(request)
            case ScoreRequest() if isinstance(self._learner, PolicyGradientLearner):
                self._learner.score(request)
            case UpdateRequest() if self._learner is not None:
                self._update = self._learner.update(request)
                return self._go_on(in_parts=request.in_parts)
            case ImitateRequest() if self._imitation is not None:
                self._update = self._imitation.update(request)
                return self._go_on(in_parts=False)
            case ContinueRequest():
                return self._go_on(in_parts=True)
            case PublishRequest() if self._bucket_arena is not None:
                publish(request, self.policy.module, self._ranks, self._bucket_arena)
            case LoadWeightsRequest() if self._bucket_arena is not None:
                take(request, self.policy.module, self._bucket_arena)
            case SaveRequest() if self._trainer is not None:
                self._save(self._trainer, Path(request.folder))
            case LoadRequest() if self._trainer is not None:
                self._trainer.optimization.load(Path(request.folder), self.policy)
                if self._learner is not None:
                    self._learner.load(Path(request.folder))
            case _:
                raise AssertionError(f"unknown request {request!r}")
        return {}

    def _go_on(self, *, in_parts: bool) -> dict[str, float] | None:
        assert self._update is not None, "no update to go on with"
        while True:
            try:
                next(self._update)
            except StopIteration as end:
                self._update = None
                return end.value
            if in_parts:
                return None

    def _save(self, trainer: Trainer, folder: Path) -> None:
        """Write policy and optimizer, then what the algorithm keeps, all ranks.

        Raises:
            CheckpointError: it could not be written (full disk); the other ranks were not kept waiting.
        """
        try:
            trainer.optimization.save(folder, self.policy)
        finally:
            if self._learner is not None:
                with writing(folder):
                    self._learner.save(folder)

    def close(self) -> None:
        """Leave the ranks and let go of the shared memory; idempotent."""
        self._ranks.close()
        if self._learner is not None:
            self._learner.close()
        if self._bucket_arena is not None:
            self._bucket_arena.close()
        if self._init.shared_arena is None:
            self._arena.close()


def describe_weights(module: nn.Module) -> tuple[WeightInfo, ...]:
    """All weights of a module."""
    return tuple(
        WeightInfo(name, w.numel(), str(w.dtype).removeprefix("torch."), w.element_size(), w.requires_grad or learned)
        for name, w, learned in _weights(module)
    )


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Name, tensor, and whether training changes it though it has no gradient: statistics among the saved buffers."""
    yield from ((name, parameter, False) for name, parameter in module.named_parameters())
    saved = module.state_dict(keep_vars=True)
    yield from ((name, buffer, True) for name, buffer in module.named_buffers() if name in saved)


def publish(request: PublishRequest, module: nn.Module, ranks: Ranks, bucket_arena: Arena) -> None:
    """Write parts of the weights into a bucket, in the type of those who take them; all ranks, the first writes."""
    parameters = {name: weight for name, weight, _ in _weights(module)}
    writes = ranks.rank_info.rank == 0
    # All ranks gather, for that is collective, also those that do not write.
    whole = {name: ranks.gathered(parameters[name]) for name in dict.fromkeys(part.name for part in request.parts)}
    if writes:
        with bucket_arena.write(request.ticket) as record:
            for part, target in _views(request.parts, bucket_arena, record):
                target.copy_(whole[part.name].detach().reshape(-1)[part.start : part.stop])


def take(request: LoadWeightsRequest, module: nn.Module, bucket_arena: Arena) -> None:
    """Replace parts of the weights by those in a bucket."""
    parameters = {name: weight for name, weight, _ in _weights(module)}
    (record,) = bucket_arena.read([request.ticket])
    with torch.no_grad():
        for part, source in _views(request.parts, bucket_arena, int(record)):
            # In place: recorded graphs and compiled code hold these very tensors.
            parameters[part.name].view(-1)[part.start : part.stop].copy_(source)
    # An engine (vLLM) and a critic apart look at this before they act.
    weights_changed(module)


def _views(parts: tuple[WeightPart, ...], bucket_arena: Arena, record: int) -> Iterator[tuple[WeightPart, Tensor]]:
    bucket = torch.from_numpy(bucket_arena[BUCKET][record])
    for part in parts:
        dtype: torch.dtype = getattr(torch, part.dtype)
        size = (part.stop - part.start) * dtype.itemsize
        yield part, bucket[part.offset : part.offset + size].view(dtype)
