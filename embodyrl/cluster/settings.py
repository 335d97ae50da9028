"""How long workers may take, and what happens when one fails."""

from enum import StrEnum

from embodyrl.config.settings import Index, Seconds, Settings

OnVideoError = StrEnum("OnVideoError", ["warn", "stop"])
OnEnvCrash = StrEnum("OnEnvCrash", ["restart", "fail"])


class StepTimeout(Settings):
    """How long a simulator may take."""

    step_timeout_s: Seconds = 120.0
    """Longest answer of an env worker for one action chunk or reset, per slot."""


class WorkerTimeouts(Settings):
    """How long workers may take."""

    start_timeout_s: Seconds = 600.0
    """Longest start of a worker: imports, simulators, weights."""
    update_timeout_s: Seconds = 3600.0
    """Longest update, checkpoint or scoring pass of the actor."""


class ActingFaults(StepTimeout, WorkerTimeouts):
    """What happens when a worker fails."""

    on_env_crash: OnEnvCrash = OnEnvCrash.restart
    """restart the env worker (its running episodes are played again) or fail."""
    max_restarts_per_worker: Index = 3
    """Restarts of one env worker before the run fails with exit code 4; also attempts at an episode that kills it."""
    on_video_error: OnVideoError = OnVideoError.warn
    """warn and go on, or stop."""
