"""Keys of all flow policies, and the records of their chunks. No torch."""

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from embodyrl.config.settings import Count, Must, Share, only
from embodyrl.policies.steering.settings import ResidualSettings, SteeringShape, steered
from embodyrl.policies.vla.records import ChunkRecord, ChunkShape, Stochastic, TokenLayout
from embodyrl.types import PolicySpec

Likelihood = StrEnum("Likelihood", ["flow_sde", "flow_cps", "flow_noise", "fpo", "dsrl", "residual"])
JointLogprob = StrEnum("JointLogprob", ["sum", "mean"])
FpoRatio = StrEnum("FpoRatio", ["mean", "sample"])
ValueFrom = StrEnum("ValueFrom", ["prefix", "expert"])
GreedyStart = StrEnum("GreedyStart", ["zero", "random"])


_RISING = only(lambda v: len(v) == 2 and 0 < v[0] < v[1])


class FlowSettings(ResidualSettings):
    """How a flow acts, and what its log-probabilities are."""

    needs = {
        "likelihood=flow_sde|flow_cps": "stochastic_steps noise_level",
        "likelihood=flow_sde": "ignore_last",
        "likelihood=flow_noise": "noise_range",
        "likelihood=dsrl": "noise_bound noise_repeated steered_noise",
        "likelihood!=dsrl": "greedy_start",
        "likelihood=fpo": "fpo_pairs fpo_ratio",
    }

    cameras: list[str] | None = None
    """Names of the environment's cameras that show what the checkpoint's cameras showed, in the checkpoint's order;
    default: the names that it was trained with."""
    num_steps: Count = 10
    """Euler steps from noise to an action chunk."""
    greedy_start: GreedyStart = GreedyStart.zero
    """Where greedy acting begins: in the middle of the noise (zero), or at noise drawn from the observation's bytes
    (random: as published evaluations draw it, and still the same for the same observation)."""
    likelihood: Likelihood = Likelihood.flow_sde
    """Where log-probabilities for RL come from: stochastic steps with a noise level (flow_sde, flow_cps) or with
    learned noise (flow_noise), or differences of the flow-matching loss (fpo). Greedy acting follows the ODE.
    The flow is frozen, and an actor learns by algorithm=sac to choose the noise that it starts from (dsrl), or to
    correct what it proposes (residual)."""
    stochastic_steps: Stochastic = Stochastic.one
    """flow_sde, flow_cps: one step of each chunk, drawn evenly, or all of them; flow_noise always takes all."""
    ignore_last: bool = False
    """Never draw the last step as the stochastic one."""
    noise_level: Annotated[float, Field(gt=0, le=1)] = 0.5
    """flow_sde, flow_cps: a of their formulas."""
    noise_range: Annotated[list[float], _RISING, Must("[low,high] with 0 < low < high, standard deviations")] = [
        0.08,
        0.16,
    ]
    """flow_noise: bounds of the standard deviation of a step."""
    joint_logprob: JointLogprob = JointLogprob.sum
    """All steps: the chain's log-probability (sum), or the mean over its steps and its first state, as RLinf has it."""
    noise_bound: Annotated[float, Field(gt=0, le=100)] = 1.5
    """dsrl: chosen noise lies within -noise_bound..noise_bound."""
    noise_repeated: bool = False
    """dsrl: one row of noise is chosen for all rows of a chunk, as its authors do for pi0, instead of each."""
    steered_noise: Share = 0.0
    """dsrl: a of flow_sde for the frozen flow's own steps while sampling, which nothing is credited for; 0: its ODE.
    A flow that was trained briefly may sample far better so."""
    fpo_pairs: Annotated[int, Field(ge=1, le=1000)] = 8
    """fpo: (noise, time) pairs per chunk, fixed when it is chosen."""
    fpo_ratio: FpoRatio = FpoRatio.mean
    """fpo: one ratio from the mean loss of the pairs, or one of each pair (sample; with logprob_type=token_level)."""
    imitated_pairs: Annotated[int, Field(ge=1, le=1000)] = 1
    """Imitation: (noise, time) pairs per chunk; the prefix, which is most of the work, is computed once for all."""
    imitated_time: Annotated[float, Field(gt=0, le=100)] = 1.5
    """Imitation: times are drawn from Beta(imitated_time, 1); pi0, pi0.5 and SmolVLA have 1.5. The larger, the nearer
    to pure noise, where only the observation can tell what is to be done."""
    value_from: ValueFrom = ValueFrom.prefix
    """What the value head reads: the pooled prefix, or the expert's mean hidden row for the middle of the noise."""

    @property
    def steers(self) -> bool:
        """The flow is frozen, and an actor around it learns."""
        return self.corrects or self.likelihood is Likelihood.dsrl

    @property
    def every_step(self) -> bool:
        """All steps are stochastic."""
        return self.likelihood is Likelihood.flow_noise or self.stochastic_steps is Stochastic.all

    @property
    def sampled_steps(self) -> int:
        """From how many steps the one stochastic step is drawn; the last one of CPS is certain."""
        skips = self.ignore_last or self.likelihood is Likelihood.flow_cps
        return self.num_steps - 1 if skips else self.num_steps

    def problems(self) -> Iterator[str]:
        """Somewhere there must be noise."""
        yield from super().problems()
        if self.steers or self.likelihood is Likelihood.fpo:
            return
        if not self.every_step and self.sampled_steps == 0:
            yield (
                "model.num_steps=1 leaves no stochastic step: flow_cps and ignore_last take none from the last. Set "
                "model.num_steps to 2 or more."
            )
        elif self.likelihood is Likelihood.flow_cps and self.num_steps == 1:
            yield "model.num_steps=1: the last step of flow_cps is certain; set model.num_steps to 2 or more."


def steering_shape(cfg: FlowSettings, shape: ChunkShape, hidden: int) -> SteeringShape:
    """What the actor beside the frozen flow reads, with `hidden` numbers of the expert, and chooses."""
    if cfg.corrects:
        return SteeringShape.correcting(cfg, hidden, shape.action_dim)
    return SteeringShape(
        features=hidden,
        rows=1,
        numbers=shape.width * (1 if cfg.noise_repeated else shape.horizon),
        actions=shape.executed,
        bound=cfg.noise_bound,
        proposes=False,
    )


def described(spec: PolicySpec, cfg: FlowSettings, shape: ChunkShape, hidden: int, folder: Path | None) -> PolicySpec:
    """The spec of a flow policy in a folder, with what changes where its flow is frozen.

    Raises:
        CheckpointError: the folder has an actor that chooses something else.
    """
    if folder is not None:
        check_steering(cfg, shape, hidden, folder)
    if cfg.steers:
        return steered(spec, steering_shape(cfg, shape, hidden), cfg.likelihood)
    return replace(spec, scored=record_of(cfg, shape).per_action)


def check_steering(cfg: FlowSettings, shape: ChunkShape, hidden: int, folder: Path) -> None:
    """Compare what an actor beside the flow chooses, if there is one, with the one of a folder, if it has one.

    Raises:
        CheckpointError: they choose something else.
    """
    if cfg.steers:
        steering_shape(cfg, shape, hidden).check(folder)


def record_of(cfg: FlowSettings, shape: ChunkShape) -> ChunkRecord:
    """Return the record of a chunk.

    One stochastic step: its index; the state before it; the executed part of the state after it. All steps: the seed of
    the first state; all states between; the executed part of the last one. FPO: the seed of the pairs; the chunk; for
    ratios of single pairs the loss of each. A frozen flow: the seed; the sampled noise or correction.
    """
    state = shape.horizon * shape.width
    if cfg.likelihood is Likelihood.fpo:
        each = cfg.fpo_ratio is FpoRatio.sample
        kept = shape.executed * cfg.fpo_pairs if each else 0
        layout = TokenLayout(whole=1, floats=state + kept)
        return ChunkRecord(shape=shape, layout=layout, per_action=cfg.fpo_pairs if each else 1)
    if cfg.steers:
        return ChunkRecord(shape=shape, layout=steering_shape(cfg, shape, 0).layout, per_action=1)
    return ChunkRecord.chain(shape, cfg.num_steps - 1 if cfg.every_step else 1)
