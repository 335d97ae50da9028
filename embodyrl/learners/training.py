"""What every trainer of a policy shares: seeds, optimizer, schedule, and the state that a checkpoint keeps."""

import math
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from embodyrl.algorithms.metrics import merge_metrics
from embodyrl.channels.arena import Arena, read_observation
from embodyrl.channels.messages import POLICY_FOLDER, RankInfo
from embodyrl.checkpoint.tensors import load_state, rng_state, save_state, set_rng_state, writing
from embodyrl.errors import CheckpointError, NonFiniteError
from embodyrl.learners.adam import build_adam
from embodyrl.learners.precision import VALUE_HEAD
from embodyrl.learners.ranks import OneRank, Ranks, S
from embodyrl.learners.schedule import Schedule
from embodyrl.learners.settings import ActorSettings, OptimSettings
from embodyrl.policies.inputs import write_inputs
from embodyrl.policies.protocol import LearnsStatistics, Policy, weights_changed
from embodyrl.types import EnvSpec, IntArray

TRAINING_STATE = "training_state"

T = TypeVar("T")
P = TypeVar("P")
M = TypeVar("M")
InParts = Generator[None, None, T]
"""Pauses where an inference may come in between."""


class Optimization:
    """AdamW with its own learning rate for the value head, and a schedule over the `total_steps` of a run."""

    def __init__(
        self,
        module: torch.nn.Module,
        optim: OptimSettings,
        total_steps: int,
        ranks: Ranks | None = None,
        *,
        warmup: int = 0,
        value_rate: bool = True,
    ) -> None:
        self._module = module
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        value = [p for name, p in named if VALUE_HEAD in name]
        # The policy's group is the first: `lr` and `step(values_only=True)` rely on that order.
        groups = [{"params": [p for name, p in named if VALUE_HEAD not in name], "lr": optim.lr}]
        if value:
            groups.append({"params": value, "lr": optim.value_lr if value_rate else optim.lr})
        self.optimizer = build_adam(
            groups,
            betas=(optim.adam_beta1, optim.adam_beta2),
            eps=optim.adam_eps,
            weight_decay=optim.weight_decay,
        )
        self._full_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._schedule = Schedule(optim, total_steps, warmup)
        self._clip = optim.clip_grad
        self._value_clip = optim.value_clip_grad if value_rate else None
        self._ranks = ranks or OneRank(RankInfo())

    @property
    def lr(self) -> float:
        """Learning rate of the last optimizer step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad()

    def step(self, position: float, *, values_only: bool = False) -> float:
        """Clip and step; returns the gradient norm. Where it is not finite, the weights stay as they are.

        Args:
            position: steps of the run that are over, with the part of the present one.
            values_only: change nothing but the value head.
        """
        if values_only:
            for parameter in self.optimizer.param_groups[0]["params"]:
                # None and not zero: AdamW would decay weights and age its moments with a gradient of zero.
                parameter.grad = None
        norm = self._clip_gradients()
        # Otherwise neither weights nor moments nor the schedule have seen this step.
        if math.isfinite(norm):
            factor = self._schedule.factor(position)
            for group, full in zip(self.optimizer.param_groups, self._full_rates, strict=True):
                group["lr"] = full * factor
            self.optimizer.step()
            weights_changed(self._module)
            self._schedule.count()
        return norm

    def _clip_gradients(self) -> float:
        """Bound the gradient of all weights, or those of the policy and of the value head apart; returns its norm."""
        groups = [[p.grad for p in group["params"] if p.grad is not None] for group in self.optimizer.param_groups]
        limits = [self._clip, self._value_clip]
        if self._value_clip is None:
            groups, limits = [[one for group in groups for one in group]], [self._clip]
        # With a limit each, the norms are of disjoint sets of weights, so their root sum of squares is the whole one.
        norms: list[float] = []
        for group, limit in zip(groups, limits, strict=False):
            if limit is None:
                continue
            norms.append(self._norm(group))
            if limit - 1e-6 < norms[-1] < math.inf:  # below it the factor is 1
                for gradient in group:
                    gradient.mul_(limit / (norms[-1] + 1e-6))
        return math.hypot(*norms)

    def _norm(self, gradients: list[Tensor]) -> float:
        """Return the norm of the whole gradient; collective where it is sharded."""
        if gradients and not self._ranks.shards and sum(one.numel() for one in gradients) < _SMALL:
            # One vector takes fewer calls. In float32 a sum over half a million numbers is 3e-5 off.
            return float(torch.linalg.vector_norm(torch.cat([one.flatten() for one in gradients]), dtype=torch.float64))
        return float(self._ranks.gathered(torch.nn.utils.get_total_norm(gradients), everywhere=True))

    def save(self, folder: Path, policy: Policy, env: EnvSpec) -> None:
        """Write the policy, and all that training needs to go on, below `folder`; all ranks, of which the first writes.

        Nothing in it depends on the number of ranks.

        Raises:
            CheckpointError: it could not be written (full disk); this rank has still done its part for the others.
        """
        problems: list[CheckpointError] = []

        def write(files: Callable[[], None]) -> None:
            if self._ranks.rank_info.rank or problems:
                return
            try:
                with writing(folder):
                    files()
            except CheckpointError as error:
                problems.append(error)

        with self._ranks.full_weights(write=False):
            # Every rank passes through here, and only the first one writes: gathering the weights is collective.
            write(lambda: _save_policy(policy, env, folder / POLICY_FOLDER))
        state = {
            "optimizer": self._ranks.gathered(self.optimizer.state_dict()),
            "schedule": {"taken": self._schedule.taken, "warm_until": self._schedule.warm_until},
            "rng": rng_state(),
        }
        write(lambda: save_state(folder, TRAINING_STATE, state))
        if problems:
            raise problems[0]

    def load(self, folder: Path, policy: Policy) -> None:
        """Load what `save` wrote. Learning rates, weight decay and the like stay those of this run's config."""
        with self._ranks.full_weights(write=True):
            policy.load_weights(folder / POLICY_FOLDER)
        state = load_state(folder, TRAINING_STATE)
        try:
            load_optimizer(self.optimizer, self._ranks.shard(state["optimizer"], self.optimizer))
        except (ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder} was written while other parameters were trained ({error}): a run resumes with its own "
                "algorithm.adv_type and adapters. To change them, start a new run with ckpt=THIS_RUN."
            ) from error
        schedule = state["schedule"]
        # Older checkpoints: optimizer steps only.
        self._schedule.taken = int(schedule.get("taken", schedule.get("last_epoch", 0)))
        self._schedule.warm_until = float(schedule.get("warm_until", 0.0))
        set_rng_state(state["rng"])


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `state_dict` returned; rates, weight decay and the like stay the optimizer's own."""
    own = ({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    # Before loading: by `fused` of these groups torch decides whether the count of steps goes to the GPU.
    groups = [saved | settings for saved, settings in zip(state["param_groups"], own, strict=True)]
    optimizer.load_state_dict(state | {"param_groups": groups})


class Trainer:
    """One rank that trains a policy, whatever the loss; the gradient is that of all ranks."""

    def __init__(
        self,
        policy: Policy,
        cfg: ActorSettings,
        *,
        skips_nonfinite: bool,
        total_steps: int,
        ranks: Ranks,
        warmup: int = 0,
        value_rate: bool = True,
    ) -> None:
        """Prepare the optimizer.

        Args:
            policy: its module is bound to `ranks` already.
            cfg: batch sizes and optimizer.
            skips_nonfinite: leave an optimizer step out where loss or gradient is not finite, instead of an error.
            total_steps: of the run, for the schedule.
            ranks: who trains together.
            warmup: see `Schedule`.
            value_rate: the value head has `value_lr` and `value_clip_grad` instead of the policy's rate and limit.
        """
        self.policy = policy
        self.cfg = cfg
        self.ranks = ranks
        self.optimization = Optimization(
            policy.module, cfg.optim, total_steps, ranks, warmup=warmup, value_rate=value_rate
        )
        self._skips_nonfinite = skips_nonfinite

    def descend(
        self,
        parts: Sequence[tuple[P, bool]],
        position: float,
        forward: Callable[[P], S],
        loss: Callable[[S, P], tuple[Tensor, M]],
        *,
        values_only: bool = False,
    ) -> InParts[tuple[dict[str, float], list[M]] | None]:
        """Accumulate gradients over micro-batches, pausing after each, and take one optimizer step.

        Args:
            parts: the micro-batches, and whether they count, as `deal` says.
            position: see `Schedule.factor`.
            forward: scores of a micro-batch.
            loss: its share of the loss, which add up, and whatever the caller wants to know of it.
            values_only: change nothing but the value head.

        Returns:
            `loss` and `grad_norm`, and what `loss` said of each micro-batch; None if the step was left out.

        Raises:
            NonFiniteError: loss or gradient is not finite.
        """
        self.optimization.zero_grad()
        losses: list[Tensor] = []
        said: list[M] = []
        for number, (part, counts) in enumerate(parts, start=1):
            scores = self.ranks.score(partial(forward, part), last=number == len(parts))
            share, own = loss(scores, part)
            # FSDP averages gradients over the ranks; the weights of the samples already add up over all of them.
            factor = self.ranks.rank_info.world if counts else 0
            (share if factor == 1 else share * factor).backward()
            if counts:
                losses.append(share.detach())
                said.append(own)
            yield
        # Before the step, so that all ranks agree whether the loss was finite: one that stepped alone would go astray.
        shares = self.ranks.exchange([{"loss": share} for share in _on_host(losses)])
        if broken := [one["loss"] for one in shares if not math.isfinite(one["loss"])]:
            return self.refuse(f"loss {broken[0]}")
        grad_norm = self.optimization.step(position, values_only=values_only)
        if not math.isfinite(grad_norm):
            return self.refuse(f"gradient norm {grad_norm}")
        return merge_metrics(shares) | {"grad_norm": grad_norm}, said

    def take_statistics(self, arena: Arena, records: IntArray) -> None:
        """Let a policy that normalises what it sees look at observations."""
        if isinstance(self.policy, LearnsStatistics):
            self.policy.take_statistics(read_observation(arena, records))
            weights_changed(self.policy.module)

    def refuse(self, what: str, *, kept: str = "the weights were not touched") -> None:
        """Drop the gradients when something is not finite; `kept` says what has changed already."""
        self.optimization.zero_grad()
        if not self._skips_nonfinite:
            raise NonFiniteError(
                f"Non-finite {what} in the actor; {kept}. Likely cause: learning rate too high "
                "or broken rewards or data. Try actor.optim.lr lower, or faults.on_nonfinite=skip."
            )


_SMALL = 2**20
"""Numbers of a gradient up to which a copy costs less than a call for each weight."""


def _on_host(scalars: list[Tensor]) -> list[float]:
    """Numbers instead of scalars on the device, which the host waits for once."""
    return torch.stack(scalars).cpu().tolist() if len(scalars) > 1 else [float(one) for one in scalars]


def _save_policy(policy: Policy, env: EnvSpec, folder: Path) -> None:
    folder.mkdir(parents=True)
    policy.save(folder)
    write_inputs(folder, policy.spec, env)


def micro_batches(cost: IntArray, size: int, budget: int | None) -> list[IntArray]:
    """Positions of the samples of each forward: `size` at a time, or, with a budget, what fits into it padded.

    Args:
        cost: [n] tokens of each sample.
        size: samples per forward without a budget.
        budget: tokens per forward; samples are sorted by length, and one that is longer alone goes alone.
    """
    if budget is None:
        return [np.arange(start, min(start + size, len(cost))) for start in range(0, len(cost), size)]
    order = np.argsort(-cost, kind="stable")
    batches: list[IntArray] = []
    while order.size:
        # Sorted by length, so the first one says how long all of the batch are padded to.
        count = max(1, budget // max(1, int(cost[order[0]])))
        batches.append(order[:count])
        order = order[count:]
    return batches


def deal(cost: IntArray, rank_info: RankInfo, size: int, max_cost: int | None) -> list[tuple[IntArray, bool]]:
    """Deal the samples of an optimizer step into micro-batches, the same number on every rank.

    Args:
        cost: [n] of each sample, as `micro_batches` takes it.
        rank_info: this rank.
        size: samples of a micro-batch, at most.
        max_cost: see `micro_batches`.

    Returns:
        (positions, whether they count) of each micro-batch: ranks with nothing left run the first sample again, because
        all ranks must take part in every collective.
    """
    # Neighbours in length go to different ranks, so that the micro-batches which run side by side are alike.
    order = np.arange(len(cost)) if max_cost is None else np.argsort(-cost, kind="stable")
    shares = [order[rank :: rank_info.world] for rank in range(rank_info.world)]
    ranks = [[rows[part] for part in micro_batches(cost[rows], size, max_cost)] for rows in shares]
    mine = [(rows, True) for rows in ranks[rank_info.rank]]
    return mine + [(np.zeros(1, np.int64), False)] * (max(map(len, ranks)) - len(mine))


def mean_metrics(steps: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps that have a metric; of names that end in _max the largest."""
    values = {name: [s[name] for s in steps if name in s] for name in dict.fromkeys(n for s in steps for n in s)}
    return {n: max(v) if n.endswith("_max") else math.fsum(v) / len(v) for n, v in values.items()}
