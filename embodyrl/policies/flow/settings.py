"""Keys that all flow policies share."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from embodyrl.config.settings import Count, Says
from embodyrl.policies.settings import WeightSettings

Likelihood = StrEnum("Likelihood", ["flow_sde", "flow_cps", "flow_noise", "fpo"])
Stochastic = StrEnum("Stochastic", ["one", "all"])
JointLogprob = StrEnum("JointLogprob", ["sum", "mean"])
FpoRatio = StrEnum("FpoRatio", ["mean", "sample"])
ValueFrom = StrEnum("ValueFrom", ["prefix", "expert"])
GreedyStart = StrEnum("GreedyStart", ["zero", "random"])


def _rising(value: list[float]) -> list[float]:
    if len(value) != 2 or not 0 < value[0] < value[1]:
        raise ValueError
    return value


class FlowSettings(WeightSettings):
    """How a flow acts, and what its log-probabilities are."""

    num_steps: Count = 10
    """Euler steps from noise to an action chunk."""
    greedy_start: GreedyStart = GreedyStart.zero
    """Where greedy acting begins: in the middle of the noise (zero), or at noise drawn from the observation's bytes
    (random: as published evaluations draw it, and still the same for the same observation)."""
    likelihood: Likelihood = Likelihood.flow_sde
    """Where log-probabilities for RL come from: stochastic steps with a noise level (flow_sde, flow_cps) or with
    learned noise (flow_noise), or differences of the flow-matching loss (fpo). Greedy acting follows the ODE."""
    stochastic_steps: Stochastic = Stochastic.one
    """flow_sde, flow_cps: one step of each chunk, drawn evenly, or all of them; flow_noise always takes all."""
    ignore_last: bool = False
    """Never draw the last step as the stochastic one."""
    noise_level: Annotated[float, Field(gt=0, le=1)] = 0.5
    """flow_sde, flow_cps: a of their formulas."""
    noise_range: Annotated[
        list[float], AfterValidator(_rising), Says("[low,high] with 0 < low < high, standard deviations")
    ] = [0.08, 0.16]
    """flow_noise: bounds of the standard deviation of a step."""
    joint_logprob: JointLogprob = JointLogprob.sum
    """All steps: the chain's log-probability (sum), or the mean over its steps and its first state, as RLinf has it."""
    fpo_pairs: Annotated[int, Field(ge=1, le=1000)] = 8
    """fpo: (noise, time) pairs per chunk, fixed when it is chosen."""
    fpo_ratio: FpoRatio = FpoRatio.mean
    """fpo: one ratio from the mean loss of the pairs, or one of each pair (sample; with logprob_type=token_level)."""
    imitated_pairs: Annotated[int, Field(ge=1, le=1000)] = 1
    """sft, dagger: (noise, time) pairs per chunk; the prefix, which is most of the work, is computed once for all."""
    imitated_time: Annotated[float, Field(gt=0, le=100)] = 1.5
    """sft, dagger: times are drawn from Beta(imitated_time, 1); pi0, pi0.5 and SmolVLA have 1.5. The larger, the nearer
    to pure noise, where only the observation can tell what is to be done."""
    value_from: ValueFrom = ValueFrom.prefix
    """What the value head reads: the pooled prefix, or the expert's mean hidden row for the middle of the noise."""

    @property
    def every_step(self) -> bool:
        """All steps are stochastic."""
        return self.likelihood is Likelihood.flow_noise or self.stochastic_steps is Stochastic.all

    @property
    def drawn_steps(self) -> int:
        """From how many steps the one stochastic step is drawn; the last one of CPS is certain."""
        skips = self.ignore_last or self.likelihood is Likelihood.flow_cps
        return self.num_steps - 1 if skips else self.num_steps

    def problems(self) -> Iterator[str]:
        """Somewhere there must be noise."""
        yield from super().problems()
        if self.likelihood is not Likelihood.fpo and not self.every_step and self.drawn_steps == 0:
            yield (
                "model.num_steps=1 leaves no stochastic step: flow_cps and ignore_last take none from the last. Set "
                "model.num_steps to 2 or more."
            )
        elif self.likelihood is Likelihood.flow_cps and self.num_steps == 1:
            yield "model.num_steps=1: the last step of flow_cps is certain; set model.num_steps to 2 or more."

    def idle(self) -> Iterator[tuple[str, str]]:
        """Name the keys of the other likelihoods."""
        yield from super().idle()
        chosen = self.likelihood
        levelled = chosen in (Likelihood.flow_sde, Likelihood.flow_cps)
        other = f"likelihood is {chosen}"
        for off, missing, keys in (
            (not levelled, other, ("stochastic_steps", "noise_level")),
            (not levelled or self.every_step, other if not levelled else "stochastic_steps is all", ("ignore_last",)),
            (chosen is not Likelihood.flow_noise, other, ("noise_range",)),
            (chosen is Likelihood.fpo, other, ("joint_logprob",)),
            (levelled and not self.every_step, "stochastic_steps is one", ("joint_logprob",)),
            (chosen is not Likelihood.fpo, other, ("fpo_pairs", "fpo_ratio")),
        ):
            yield from ((f"model.{key}", missing) for key in keys if off)
