"""Common parts of trainers: seeds, optimizer, schedule, and the state of a checkpoint."""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from embodyrl.algorithms.metrics import merge_metrics
from embodyrl.channels.arena import Arena, read_observation
from embodyrl.channels.messages import POLICY_FOLDER, RankInfo
from embodyrl.checkpoint.tensors import convert_write_errors, get_rng_state, load_state, save_state, set_rng_state
from embodyrl.errors import CheckpointError, NonFiniteError
from embodyrl.learners.adam import build_adam
from embodyrl.learners.precision import VALUE_HEAD
from embodyrl.learners.ranks import Ranks, S
from embodyrl.learners.schedule import Schedule
from embodyrl.learners.settings import ActorSettings, OptimSettings
from embodyrl.policies.inputs import write_inputs
from embodyrl.policies.protocol import LearnsStatistics, Policy, mark_weights_changed
from embodyrl.types import ByteArray, EnvSpec, IntArray

TRAINING_STATE = "training_state"
UNCHANGED = "this optimizer step left the weights unchanged"
"""Text about the weights in errors after a rejected optimizer step. Earlier steps of the same update stay in effect."""

T = TypeVar("T")
P = TypeVar("P")
M = TypeVar("M")
UpdateGenerator = Generator[None, None, T]
"""Generator that yields between micro-batches, so that inference can be interleaved, and returns T."""


class Optimization:
    """AdamW with a learning-rate schedule over the `total_steps` of a run, and a separate rate for the value head."""

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
        # The policy's group is the first: `lr` and `step(values_only=True)` depend on that order.
        groups = [{"params": [p for name, p in named if VALUE_HEAD not in name], "lr": optim.lr}]
        if value:
            groups.append({"params": value, "lr": optim.value_lr if value_rate else optim.lr})
        self.optimizer = build_adam(groups, weight_decay=optim.weight_decay, **optim.adam)
        self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._schedule = Schedule(optim, total_steps, warmup)
        self._clip = optim.clip_grad
        self._value_clip = optim.value_clip_grad if value_rate else None
        self._ranks = ranks or Ranks(RankInfo())

    @property
    def lr(self) -> float:
        """Learning rate of the policy in the last optimizer step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        self.optimizer.zero_grad()

    def step(self, position: float, *, values_only: bool = False) -> float:
        """Clip the gradient and take an optimizer step, unless the gradient norm is not finite; return the norm.

        Args:
            position: number of finished training steps of the run, plus the fraction of the current step.
            values_only: update only the value head.
        """
        if values_only:
            for parameter in self.optimizer.param_groups[0]["params"]:
                # None instead of zero: AdamW would apply weight decay and update its moments with a zero gradient.
                parameter.grad = None
        norm = self._clip_gradients()
        # If the norm is not finite, weights, moments and schedule are not updated.
        if math.isfinite(norm):
            factor = self._schedule.factor(position)
            for group, full in zip(self.optimizer.param_groups, self._base_rates, strict=True):
                group["lr"] = full * factor
            self.optimizer.step()
            mark_weights_changed(self._module)
            self._schedule.step()
        return norm

    def _clip_gradients(self) -> float:
        """Clip the gradient of all weights, or of policy and value head separately; return the norm before clipping."""
        groups = [[p.grad for p in group["params"] if p.grad is not None] for group in self.optimizer.param_groups]
        limits = [self._clip, self._value_clip]
        if self._value_clip is None:
            groups, limits = [[gradient for group in groups for gradient in group]], [self._clip]
        # With separate limits, groups have disjoint weights, so the total norm is the root of the sum of squared norms.
        norms: list[float] = []
        for group, limit in zip(groups, limits, strict=False):
            if limit is None:
                continue
            norms.append(self._compute_norm(group))
            if limit - 1e-6 < norms[-1] < math.inf:  # below the limit the factor is 1
                for gradient in group:
                    gradient.mul_(limit / (norms[-1] + 1e-6))
        return math.hypot(*norms)

    def _compute_norm(self, gradients: list[Tensor]) -> float:
        """Return the norm of the full gradient; collective if sharded."""
        if (
            gradients
            and not self._ranks.shards
            and sum(gradient.numel() for gradient in gradients) < _MAX_CONCATENATED_ELEMENTS
        ):
            # One vector needs fewer calls. A float32 sum over half a million numbers has an error of 3e-5.
            return float(
                torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]), dtype=torch.float64)
            )
        return float(self._ranks.gather(torch.nn.utils.get_total_norm(gradients), everywhere=True))

    def save(self, folder: Path, policy: Policy, env: EnvSpec) -> None:
        """Write the policy and the training state into `folder`. All ranks call this method; the first rank writes.

        The files are independent of the number of ranks.

        Raises:
            CheckpointError: writing failed (full disk); this rank has still run the collectives.
        """
        problems: list[CheckpointError] = []

        def write(write_files: Callable[[], None]) -> None:
            if self._ranks.rank_info.rank or problems:
                return
            try:
                with convert_write_errors(folder):
                    write_files()
            except CheckpointError as error:
                problems.append(error)

        with self._ranks.full_weights(write=False):
            # All ranks run this code, because gathering the weights is collective; only the first rank writes.
            write(lambda: _save_policy(policy, env, folder / POLICY_FOLDER))
        state = {
            "optimizer": self._ranks.gather(self.optimizer.state_dict()),
            "schedule": {"taken": self._schedule.num_steps, "warm_until": self._schedule.warmup_end},
            "rng": get_rng_state(),
        }
        write(lambda: save_state(folder, TRAINING_STATE, state))
        if problems:
            raise problems[0]

    def load(self, folder: Path, policy: Policy) -> None:
        """Load the files written by `save`.

        Learning rates, weight decay and similar settings are those of this run's config.
        """
        with self._ranks.full_weights(write=True):
            policy.load_weights(folder / POLICY_FOLDER)
        state = load_state(folder, TRAINING_STATE)
        with reject_other_state(folder, "algorithm.adv_type and adapters"):
            load_optimizer(self.optimizer, self._ranks.shard_optimizer_state(state["optimizer"], self.optimizer))
        self._schedule.num_steps = int(state["schedule"]["taken"])
        self._schedule.warmup_end = float(state["schedule"]["warm_until"])
        set_rng_state(state["rng"])


@contextmanager
def reject_other_state(folder: Path, settings: str) -> Iterator[None]:
    """Convert errors of loading a training state to a `CheckpointError`; `settings` are those that a run must keep."""
    try:
        yield
    except (ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} contains other trained parameters than this run ({error}). A resumed run needs the same "
            f"{settings}. To change them, start a new run with ckpt=THIS_RUN."
        ) from error


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a `state_dict()` into an optimizer, but keep its current learning rates and other hyperparameters."""
    own = ({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    # Groups are merged before loading, because torch moves the step count to the GPU depending on their `fused`.
    groups = [saved | settings for saved, settings in zip(state["param_groups"], own, strict=True)]
    optimizer.load_state_dict(state | {"param_groups": groups})


def load_parts(parts: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Load the states of networks and optimizers (see `load_optimizer`), by name."""
    for name, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            load_optimizer(part, state[name])
        else:
            part.load_state_dict(state[name])


def backward(optimizer: torch.optim.Optimizer, loss: Tensor, limit: float | None = None) -> float:
    """Compute the gradients of an optimizer's only group, and clip their norm to `limit`; return the unclipped norm."""
    optimizer.zero_grad()
    loss.backward()
    weights = optimizer.param_groups[0]["params"]
    return float(torch.nn.utils.clip_grad_norm_(weights, math.inf if limit is None else limit))


@torch.no_grad()
def update_targets(targets: torch.nn.Module, critics: torch.nn.Module, tau: float) -> None:
    """Move the weights of the target critics towards the weights of the critics by the fraction `tau`."""
    for target, weight in zip(targets.parameters(), critics.parameters(), strict=True):
        target.lerp_(weight, tau)


class Trainer:
    """Training loop of one rank: optimizer steps with any loss, and gradients reduced over all ranks."""

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
        """Create the optimizer and its schedule.

        Args:
            policy: policy whose module is already wrapped by `ranks`.
            cfg: settings of batch sizes and optimizer.
            skips_nonfinite: skip an optimizer step with a non-finite loss or gradient instead of raising.
            total_steps: training steps of the run, for the schedule.
            ranks: the training processes.
            warmup: see `Schedule`.
            value_rate: the value head has `value_lr` and `value_clip_grad` instead of the policy's rate and limit.
        """
        self.policy, self.cfg, self.ranks = policy, cfg, ranks
        self.optimization = Optimization(
            policy.module, cfg.optim, total_steps, ranks, warmup=warmup, value_rate=value_rate
        )
        self._skips_nonfinite = skips_nonfinite

    def run_optimizer_step(
        self,
        parts: Sequence[tuple[P, bool]],
        position: float,
        forward: Callable[[P], S],
        loss: Callable[[S, P], tuple[Tensor, M]],
        *,
        values_only: bool = False,
        weights_status: str = UNCHANGED,
    ) -> UpdateGenerator[tuple[dict[str, float], list[M]] | None]:
        """Accumulate gradients over micro-batches, and take one optimizer step. Yield after each micro-batch.

        Args:
            parts: micro-batches with their flags, as returned by `split_micro_batches`.
            position: see `Schedule.factor`.
            forward: function that returns the scores of a micro-batch.
            loss: function that returns the micro-batch's share of the loss (shares are summed) and its metrics.
            values_only: update only the value head.
            weights_status: state of the weights after a rejected step, for the error (see `reject_step`).

        Returns:
            `loss` and `grad_norm`, and the metrics of each micro-batch; None if the step was skipped.

        Raises:
            NonFiniteError: loss or gradient is not finite.
        """
        self.optimization.zero_grad()
        losses: list[Tensor] = []
        outputs: list[M] = []
        for number, (part, counts) in enumerate(parts, start=1):
            scores = self.ranks.forward(partial(forward, part), last=number == len(parts))
            micro_batch_loss, output = loss(scores, part)
            # FSDP averages gradients over the ranks, but the sample weights sum to 1 over all ranks.
            factor = self.ranks.rank_info.world if counts else 0
            (micro_batch_loss if factor == 1 else micro_batch_loss * factor).backward()
            if counts:
                losses.append(micro_batch_loss.detach())
                outputs.append(output)
            yield
        # Losses are gathered before the step, so that all ranks detect a non-finite loss; else weights would diverge.
        step_losses = self.ranks.gather_metrics(
            [{"loss": micro_batch_loss} for micro_batch_loss in _copy_to_host(losses)]
        )
        if non_finite := [step_loss["loss"] for step_loss in step_losses if not math.isfinite(step_loss["loss"])]:
            return self.reject_step(f"loss {non_finite[0]}", weights_status=weights_status)
        grad_norm = self.optimization.step(position, values_only=values_only)
        if not math.isfinite(grad_norm):
            return self.reject_step(f"gradient norm {grad_norm}", weights_status=weights_status)
        return merge_metrics(step_losses) | {"grad_norm": grad_norm}, outputs

    def split_micro_batches(self, count: int, cost: IntArray | None = None) -> list[tuple[IntArray, bool]]:
        """Split `count` samples into this rank's micro-batches (see `split_micro_batches`).

        `cost` [count]: tokens of each sample, for `max_tokens_per_mbs`; None: only `micro_batch_size` is a limit.
        """
        limit = None if cost is None else self.cfg.max_tokens_per_mbs
        cost = np.ones(count, np.int64) if cost is None else cost
        return split_micro_batches(cost, self.ranks.rank_info, self.cfg.micro_batch_size, limit)

    def update_statistics(self, arena: Arena, records: IntArray) -> None:
        """Update the observation statistics of a policy that normalizes observations."""
        if isinstance(self.policy, LearnsStatistics):
            self.policy.update_statistics(read_observation(arena, records))
            mark_weights_changed(self.policy.module)

    def reject_step(self, description: str, *, weights_status: str = UNCHANGED) -> None:
        """Discard the gradients of a step with a non-finite value; raise an error unless `faults.on_nonfinite=skip`.

        The error contains `description`, the non-finite value, and `weights_status`, the state of the weights.
        """
        self.optimization.zero_grad()
        if not self._skips_nonfinite:
            raise NonFiniteError(
                f"Non-finite {description} in the actor; {weights_status}. Likely cause: learning rate "
                f"too high, or wrong rewards or data. Lower actor.optim.lr, or set faults.on_nonfinite=skip."
            )


_MAX_CONCATENATED_ELEMENTS = 2**20
"""Number of gradient elements below which one concatenation is faster than one call per weight."""


def _copy_to_host(scalars: list[Tensor]) -> list[float]:
    """Copy scalar tensors to the host, with a single synchronization of the device."""
    return torch.stack(scalars).cpu().tolist() if len(scalars) > 1 else [float(scalar) for scalar in scalars]


def _save_policy(policy: Policy, env: EnvSpec, folder: Path) -> None:
    folder.mkdir(parents=True)
    policy.save(folder)
    write_inputs(folder, policy.spec, env)


def list_micro_batches(cost: IntArray, size: int, budget: int | None) -> list[IntArray]:
    """Return the sample indices of each micro-batch: `size` samples each, or at most `budget` padded tokens each.

    Args:
        cost: [n] tokens of each sample.
        size: number of samples per forward pass without a budget.
        budget: tokens per forward pass; samples are sorted by length. A sample above the budget is a separate batch.
    """
    if budget is None:
        return [np.arange(start, min(start + size, len(cost))) for start in range(0, len(cost), size)]
    order = np.argsort(-cost, kind="stable")
    batches: list[IntArray] = []
    while order.size:
        # Sorted by length, so the first sample determines the padded length of the batch.
        count = max(1, budget // max(1, int(cost[order[0]])))
        batches.append(order[:count])
        order = order[count:]
    return batches


def order_by_prompt(prompts: ByteArray, cost: IntArray) -> IntArray:
    """Return sample indices grouped by prompt; the group with the longest sample is first.

    Args:
        prompts: [n, W] prompt of each sample, as in `Record.instruction`.
        cost: [n] tokens of each sample.
    """
    group_by_prompt: dict[bytes, int] = {}
    groups = np.array([group_by_prompt.setdefault(row.tobytes(), len(group_by_prompt)) for row in prompts], np.int64)
    longest = np.zeros(len(group_by_prompt), np.int64)
    np.maximum.at(longest, groups, cost)
    return np.lexsort((groups, -longest[groups]))


def split_micro_batches(
    cost: IntArray, rank_info: RankInfo, size: int, max_cost: int | None
) -> list[tuple[IntArray, bool]]:
    """Return this rank's micro-batches of an optimizer step. Every rank gets the same number of micro-batches.

    Args:
        cost: [n] tokens of each sample.
        rank_info: this rank.
        size: maximum samples of a micro-batch.
        max_cost: see `list_micro_batches`.

    Returns:
        (sample indices, flag) of each micro-batch. A rank with too few samples runs the first sample with flag False,
        because all ranks must take part in every collective operation.
    """
    # Samples of similar length go to different ranks, so that concurrent micro-batches have similar cost.
    order = np.arange(len(cost)) if max_cost is None else np.argsort(-cost, kind="stable")
    samples_by_rank = [order[rank :: rank_info.world] for rank in range(rank_info.world)]
    ranks = [[rows[part] for part in list_micro_batches(cost[rows], size, max_cost)] for rows in samples_by_rank]
    own_batches = [(rows, True) for rows in ranks[rank_info.rank]]
    return own_batches + [(np.zeros(1, np.int64), False)] * (max(map(len, ranks)) - len(own_batches))


def average_metrics(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the steps that report the metric; the maximum for names that end in _max."""
    values = {name: [s[name] for s in steps if name in s] for name in dict.fromkeys(n for s in steps for n in s)}
    return {n: max(v) if n.endswith("_max") else math.fsum(v) / len(v) for n, v in values.items()}


def summarize_updates(steps: list[dict[str, float]], count: int, lr: float) -> dict[str, float]:
    """Return the mean metrics of the optimizer steps; all other steps of the `count` updates were skipped."""
    counts = {"optimizer_steps": float(len(steps)), "skipped_nonfinite": float(count - len(steps))}
    return counts | {"lr": lr} | average_metrics(steps)
