"""Page, policy and environment of `embodyrl play`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.errors import ConfigError
from embodyrl.web_pages.loopback import Answer

if TYPE_CHECKING:
    from embodyrl.api.acting import LoadedPolicy
    from embodyrl.api.environment import SingleEnv
    from embodyrl.plan.run_plan import RunPlan

_WITH_VIDEO = ("video=all",)
"""Override that makes the environment render images."""
_WITHOUT_TIME_LIMIT = ("env.eval.max_episode_steps=100000",)
"""Override that removes the time limit of an episode, because the user ends the episode."""
_IGNORE_TERMINATIONS = ("env.eval.ignore_terminations=true",)
"""Override that continues an episode after success; not used for recorded episodes."""


def page() -> Answer:
    """Return the content type and the HTML of the page."""
    text = files("embodyrl.play").joinpath("page.html").read_bytes()
    return "text/html; charset=utf-8", text


def load_policy_with_env(
    run: Path, trust: Sequence[str] = (), *, records: bool = False
) -> tuple[LoadedPolicy, SingleEnv]:
    """Load the policy of a run and build its environment, if possible with images and without a time limit."""
    from embodyrl.api.acting import load_policy

    no_limits = _WITHOUT_TIME_LIMIT if records else (*_WITHOUT_TIME_LIMIT, *_IGNORE_TERMINATIONS)
    for overrides in ((*_WITH_VIDEO, *no_limits), _WITH_VIDEO):
        with suppress(ConfigError):  # for an environment that ends by itself, or renders no frames
            policy = load_policy(run, *overrides, *trust)
            return policy, _build_env(policy.run_plan)
    policy = load_policy(run, *trust)
    return policy, _build_env(policy.run_plan)


def _build_env(run_plan: RunPlan) -> SingleEnv:
    """Return the environment of a run without an inference delay, because the page executes one action per step."""
    from embodyrl.api.environment import build_env_of_plan

    return build_env_of_plan(replace(run_plan, env_settings=run_plan.env_settings.without_delay()))
