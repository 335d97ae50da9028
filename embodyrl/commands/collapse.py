"""Warnings about falling success, entropy collapse and reward hacking, from the metrics of the training steps."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from embodyrl.types import ActionKind, EnvSpec

WINDOW = 5
"""Number of training steps per window; the means of the first and the last window are compared."""
_ENTROPY_FRACTION = 0.1
"""Fraction of the initial entropy below which entropy collapse is reported."""
_SUCCESS_FRACTION = 0.5
"""Fraction of the initial success rate below which falling success is reported."""
_SOLVED_RATE = 0.9
"""Success rate above which a low entropy is not reported."""
_MIN_RETURN_INCREASE = 0.05
"""Minimum increase of the return for warnings about reward hacking, in addition to 10 % of the initial return."""
_COMPONENT_FRACTION, _LENGTH_FRACTION, _CUT_OFF = 0.5, 1 / 3, 0.5
"""Warning thresholds for a reward component, the reply length and the share of truncated replies.

The first two thresholds are fractions of the initial value.
"""
_MIN_INITIAL_COMPONENT = 0.1
"""Minimum initial mean of a reward component for a warning about its decrease."""


class CollapseCheck:
    """Compares the last training steps with the first steps; each warning is issued once per run."""

    def __init__(self, *, rewards: Sequence[str], text: bool) -> None:
        """Select the metrics to compare.

        Args:
            rewards: names of the reward components with a positive weight.
            text: the run trains a language model; reply lengths and token entropies are also compared.
        """
        self._parts = [f"train/reward_{name}" for name in rewards]
        self._text = text
        self._first: list[Mapping[str, float | None]] = []
        self._last: deque[Mapping[str, float | None]] = deque(maxlen=WINDOW)
        self._issued_warnings: set[str] = set()

    def check(self, step: int, metrics: Mapping[str, float | None]) -> list[str]:
        """Add the metrics of a step and return new warnings, one line each."""
        if "train/return" not in metrics:
            return []
        if len(self._first) < WINDOW:
            self._first.append(metrics)
            return []
        self._last.append(metrics)
        if len(self._last) < WINDOW:
            return []
        warnings = {warning.partition(":")[0]: warning for warning in self._find_warnings()}
        new = [warning for name, warning in warnings.items() if name not in self._issued_warnings]
        self._issued_warnings |= warnings.keys()
        return [f"warning: step {step}: {warning}" for warning in new]

    def _compare_windows(self, name: str) -> tuple[float, float] | None:
        """Return the means of a metric over the first and over the last `WINDOW` steps."""
        means = []
        for rows in (self._first, self._last):
            values = [value for row in rows if (value := row.get(name)) is not None]
            if not values:
                return None
            means.append(sum(values) / len(values))
        return means[0], means[1]

    def _success_warning(self, success: tuple[float, float]) -> str | None:
        """Return a warning, with KL and learning rate, if the success rate falls by more than three standard errors."""
        episodes = self._compare_windows("train/episodes")
        if not episodes or success[1] >= _SUCCESS_FRACTION * success[0]:
            return None
        mean, count = sum(success) / 2, WINDOW * min(episodes)
        if success[0] - success[1] < 3 * math.sqrt(2 * mean * (1 - mean) / count):
            return None
        kl, rate = self._compare_windows("actor/kl"), self._compare_windows("actor/lr")
        kl_text = f" KL per step: {kl[0]:.2g} in the first steps, {kl[1]:.2g} in the last steps." if kl else ""
        rate_text = f" (last: {rate[1]:.2g})" if rate else ""
        return (
            f"success falls: {success[0]:.0%} in the first steps, {success[1]:.0%} in the last steps.{kl_text} Lower "
            f"actor.optim.lr{rate_text}, increase actor.optim.warmup_steps, or set algorithm.kl_beta."
        )

    def _find_warnings(self) -> Iterator[str]:
        success = self._compare_windows("train/success_once")
        if success and (warning := self._success_warning(success)):
            yield warning
        entropy = self._compare_windows("actor/entropy") if self._text else None
        is_unsolved = success is None or success[1] < _SOLVED_RATE
        if entropy and is_unsolved and entropy[0] > 0 and entropy[1] < _ENTROPY_FRACTION * entropy[0]:
            yield (
                f"entropy collapse: {entropy[0]:.3g} nats in the first steps, {entropy[1]:.3g} in the last steps. "
                "Lower actor.optim.lr, or set algorithm.entropy_bonus or algorithm.kl_beta."
            )
        returns = self._compare_windows("train/return")
        if returns is None or returns[1] - returns[0] < _MIN_RETURN_INCREASE + 0.1 * abs(returns[0]):
            return
        return_change = f"the return rises from {returns[0]:.3g} to {returns[1]:.3g}"
        for name in self._parts:
            part = self._compare_windows(name)
            if part and part[0] > _MIN_INITIAL_COMPONENT and part[1] < _COMPONENT_FRACTION * part[0]:
                yield (
                    f"possible reward hacking, {name.removeprefix('train/reward_')}: {return_change}, but this reward "
                    f"falls from {part[0]:.3g} to {part[1]:.3g}. Read the replies: `embodyrl report`."
                )
        length, cut_off = self._compare_windows("train/episode_len"), self._compare_windows("train/cut_off")
        if self._text and length and length[1] < _LENGTH_FRACTION * length[0]:
            yield (
                f"possible reward hacking, length: {return_change}, but the mean length of replies falls from "
                f"{length[0]:.3g} to {length[1]:.3g} tokens. Read the replies: `embodyrl report`."
            )
        if cut_off and cut_off[1] > max(_CUT_OFF, 2 * cut_off[0]):
            yield (
                f"possible reward hacking, cut off: {return_change}, but {cut_off[1]:.0%} of the replies reach "
                f"algorithm.sampling_params.max_new_tokens, {cut_off[0]:.0%} in the first steps. Read the replies: "
                "`embodyrl report`."
            )


def build_collapse_check(env: EnvSpec) -> CollapseCheck:
    """Build the check of a run's training steps."""
    rewards = [name for name, weight in zip(env.reward.components, env.reward.weights, strict=False) if weight > 0]
    return CollapseCheck(rewards=rewards, text=env.action.kind is ActionKind.text)
