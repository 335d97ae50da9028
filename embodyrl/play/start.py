"""Page, policy and environment of `embodyrl play`."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from embodyrl.api.acting import LoadedPolicy, load_policy
from embodyrl.api.environment import SingleEnv, build_env_of_plan
from embodyrl.errors import ConfigError
from embodyrl.web_pages.loopback import Answer

_WITH_VIDEO = "video=all"
"""Override that makes the environment render images."""
_WITHOUT_TIME_LIMIT = "env.eval.max_episode_steps=100000"
"""Override that removes the time limit of an episode, because the user ends the episode."""
_IGNORE_TERMINATIONS = "env.eval.ignore_terminations=true"
"""Override that continues an episode after success; not used for recorded episodes."""


def page() -> Answer:
    """Return the content type and the HTML of the page."""
    text = files("embodyrl.play").joinpath("page.html").read_bytes()
    return "text/html; charset=utf-8", text


def load_policy_with_env(
    run: Path, trust: Sequence[str] = (), *, records: bool = False
) -> tuple[LoadedPolicy, SingleEnv]:
    """Load the policy of a run and build its environment, if possible with images and without a time limit."""
    no_limits = [_WITHOUT_TIME_LIMIT] if records else [_WITHOUT_TIME_LIMIT, _IGNORE_TERMINATIONS]
    for overrides in ([_WITH_VIDEO, *no_limits], [_WITH_VIDEO]):
        with suppress(ConfigError):  # for an environment that ends by itself, or renders no frames
            return _load(run, *overrides, *trust)
    return _load(run, *trust)


def _load(run: Path, *overrides: str) -> tuple[LoadedPolicy, SingleEnv]:
    """Load a policy and its environment without an inference delay, because the page executes one action per step."""
    policy = load_policy(run, *overrides)
    env_settings = policy.run_plan.env_settings.without_delay()
    return policy, build_env_of_plan(replace(policy.run_plan, env_settings=env_settings))
