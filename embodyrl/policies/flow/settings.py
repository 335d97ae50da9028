"""Config keys for all flow policies, and the token layouts of their chunks. Does not import torch."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from embodyrl.config.settings import Constraint, Count, Share, valid_if
from embodyrl.policies.steering.settings import ResidualSettings, SteeringShape
from embodyrl.policies.vla.records import ChunkRecord, ChunkShape, Stochastic, TokenLayout
from embodyrl.types import EnvSpec, GripperConvention

Likelihood = StrEnum("Likelihood", ["flow_sde", "flow_cps", "flow_noise", "fpo", "dsrl", "residual"])
JointLogprob = StrEnum("JointLogprob", ["sum", "mean"])
ValueFrom = StrEnum("ValueFrom", ["prefix", "expert"])
GreedyStart = StrEnum("GreedyStart", ["zero", "random"])


_IS_INCREASING = valid_if(lambda v: len(v) == 2 and 0 < v[0] < v[1])


class FlowSettings(ResidualSettings):
    """Config keys for sampling and log-probabilities of a flow."""

    keys_by_condition = {
        "likelihood=flow_sde|flow_cps": "stochastic_steps noise_level",
        "likelihood=flow_sde and stochastic_steps=one": "ignore_last",
        "likelihood=flow_noise or likelihood=flow_sde|flow_cps and stochastic_steps=all": "joint_logprob",
        "likelihood=flow_noise": "noise_range",
        "likelihood=dsrl": "noise_bound noise_repeated steered_noise",
        "likelihood!=dsrl": "greedy_start",
        "likelihood=fpo": "fpo_pairs",
        "/command=sft|dagger or /algorithm.imitates: reinforcement learning does not imitate actions": "imitated_pairs "
        "imitated_time",
        "/algorithm.value_coef: no value head is trained": "value_from",
    }

    cameras: list[str] | None = None
    """Environment cameras that correspond to the checkpoint's cameras, in the checkpoint's order; default: the
    checkpoint's names."""
    num_steps: Count = 10
    """Number of Euler steps from noise to an action chunk."""
    greedy_start: GreedyStart = GreedyStart.zero
    """Initial noise of greedy actions. zero: no noise; random: Gaussian noise as in published evaluations, seeded by a
    hash of the observation."""
    likelihood: Likelihood = Likelihood.flow_sde
    """Source of log-probabilities for RL. flow_sde, flow_cps: stochastic steps with a given noise level; flow_noise:
    stochastic steps with learned noise; fpo: differences of the flow-matching loss. dsrl, residual: the flow is frozen,
    and algorithm=sac trains an actor that chooses the initial noise (dsrl) or corrects the actions (residual). Greedy
    actions follow the ODE."""
    stochastic_steps: Stochastic = Stochastic.one
    """Stochastic steps per chunk with flow_sde and flow_cps: one random step, or all steps. With flow_noise, all steps
    are stochastic."""
    ignore_last: bool = False
    """With likelihood=flow_sde and stochastic_steps=one: make the last denoising step deterministic."""
    noise_level: Annotated[float, Field(gt=0, le=1)] = 0.5
    """With likelihood=flow_sde or flow_cps: noise level of the stochastic steps (symbol `a` in the papers)."""
    noise_range: Annotated[
        list[float], _IS_INCREASING, Constraint("[low,high] with 0 < low < high, standard deviations")
    ] = [
        0.08,
        0.16,
    ]
    """With likelihood=flow_noise: minimum and maximum standard deviation of a step."""
    joint_logprob: JointLogprob = JointLogprob.sum
    """Log-probability of a chunk with stochastic_steps=all: sum over the steps, or mean over the steps and the initial
    noise (RLinf)."""
    noise_bound: Annotated[float, Field(gt=0, le=100)] = 1.5
    """With likelihood=dsrl: bound of the initial noise that the actor chooses, -noise_bound..noise_bound."""
    noise_repeated: bool = False
    """With likelihood=dsrl: use one noise vector for all actions of a chunk, as in the DSRL paper for pi0; false: one
    vector per action."""
    steered_noise: Share = 0.0
    """With likelihood=dsrl: noise level of flow_sde for sampling from the frozen flow; 0: ODE. The noise can improve
    samples of an undertrained flow and is not part of log-probabilities."""
    fpo_pairs: Annotated[int, Field(ge=1, le=1000)] = 8
    """With likelihood=fpo: number of (noise, time) pairs per chunk, sampled with the chunk."""
    imitated_pairs: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of (noise, time) pairs per chunk in SFT; the prefix, which takes most of the time, is computed once for
    all pairs."""
    imitated_time: Annotated[float, Field(gt=0, le=100)] = 1.5
    """Parameter of the distribution Beta(imitated_time, 1) of flow times in SFT; pi0, pi0.5 and SmolVLA use 1.5. With a
    larger value, more times are close to 1 (pure noise), where only the observation determines the actions."""
    value_from: ValueFrom = ValueFrom.prefix
    """Input of the value head: the pooled prefix, or the mean hidden state of the action expert for zero noise."""

    @property
    def every_step(self) -> bool:
        """True if all steps are stochastic."""
        return self.likelihood is Likelihood.flow_noise or self.stochastic_steps is Stochastic.all

    @property
    def sampled_steps(self) -> int:
        """Number of denoising steps from which the single stochastic step is sampled."""
        skips_last = self.ignore_last or self.likelihood is Likelihood.flow_cps
        return self.num_steps - 1 if skips_last else self.num_steps

    @property
    def scored_passes(self) -> int:
        """Number of passes of the action expert that compute the log-probabilities of a chunk."""
        if self.likelihood is Likelihood.fpo:
            return self.fpo_pairs
        return self.num_steps if self.every_step else 1

    def problems(self) -> Iterator[str]:
        """Yield errors for invalid combinations of settings, for example those that leave no stochastic step."""
        yield from super().problems()
        if self.is_steered or self.likelihood is Likelihood.fpo:
            return
        if self.sampled_steps == 0 and (not self.every_step or self.likelihood is Likelihood.flow_cps):
            yield (
                "model.num_steps=1 leaves no stochastic step: with flow_cps or ignore_last, the last step is "
                "deterministic. Set model.num_steps to 2 or more."
            )


def get_flow_gripper(env: EnvSpec) -> GripperConvention | None:
    """Return the gripper convention of flow policies (-1 open, 1 closed), which is that of LIBERO; None: no gripper."""
    gripper = env.action.gripper
    return None if gripper is None else GripperConvention(open=-1.0, closed=1.0, index=gripper.index)


def get_steering_shape(cfg: FlowSettings, shape: ChunkShape, hidden: int) -> SteeringShape | None:
    """Return the input and output sizes of the actor for a frozen flow; None if the flow is trained.

    `hidden` is the width of the expert's hidden states.
    """
    if not cfg.is_steered:
        return None
    if cfg.is_residual:
        return SteeringShape.for_residual(cfg, hidden, shape.action_dim)
    num_values = shape.width * (1 if cfg.noise_repeated else shape.horizon)
    return SteeringShape.for_noise(hidden, num_values, actions=shape.executed, bound=cfg.noise_bound)


def get_chunk_record(cfg: FlowSettings, shape: ChunkShape) -> ChunkRecord:
    """Return the token layout of a sampled chunk, which depends on the likelihood.

    * One stochastic step: index of the step, state before the step, executed part of the state after the step.
    * All steps stochastic: seed of the first state, all intermediate states, executed part of the last state.
    * FPO: seed of the (noise, time) pairs, and chunk.

    The tokens of an actor for a frozen flow are those of `SteeringShape`.
    """
    if cfg.likelihood is Likelihood.fpo:
        return ChunkRecord(
            shape=shape, layout=TokenLayout(integers=1, floats=shape.horizon * shape.width), per_action=1
        )
    return ChunkRecord.chain(shape, cfg.num_steps - 1 if cfg.every_step else 1)
