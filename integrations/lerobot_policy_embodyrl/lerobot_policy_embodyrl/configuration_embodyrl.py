"""Options below `--policy` for `--policy.type=embodyrl`."""

from dataclasses import dataclass, field

from lerobot.configs.policies import PreTrainedConfig


@PreTrainedConfig.register_subclass("embodyrl")
@dataclass
class EmbodyrlConfig(PreTrainedConfig):
    """A policy of embodyrl, which normalizes observations and actions itself."""

    run: str = ""
    """A run of embodyrl, one of its checkpoints, or a model folder; relative to the working directory."""
    overrides: list[str] = field(default_factory=list)
    """Overrides as for `embodyrl eval`; a model folder needs env= and model=."""
    python: str | None = None
    """Interpreter that has embodyrl; default: the variable EMBODYRL_PYTHON, else this interpreter."""
    timeout_s: float = 300.0
    """Limit of each reply of the policy in seconds."""

    @property
    def observation_delta_indices(self) -> None:
        """The policy is not trained by LeRobot."""
        return None

    @property
    def action_delta_indices(self) -> None:
        """The policy is not trained by LeRobot."""
        return None

    @property
    def reward_delta_indices(self) -> None:
        """The policy is not trained by LeRobot."""
        return None

    def get_optimizer_preset(self):
        """Raise an error: the policy is trained by `embodyrl train`."""
        raise ValueError("policies of embodyrl are trained by `embodyrl train` or `embodyrl sft`, not by LeRobot.")

    def get_scheduler_preset(self) -> None:
        """Return None: the policy is not trained by LeRobot."""
        return None

    def validate_features(self) -> None:
        """Check that the policy is named; its process checks the observations."""
        if not self.run:
            raise ValueError("--policy.run is not set. Set it to a run of embodyrl or to a model folder.")
