"""Options below `--env` for `--env.type=embodyrl`."""

from dataclasses import dataclass, field

from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

from lerobot_env_embodyrl.environment import start_simulator

GYM_ID = "lerobot_env_embodyrl/Simulator-v0"


@EnvConfig.register_subclass("embodyrl")
@dataclass
class EmbodyrlEnvConfig(EnvConfig):
    """An environment of embodyrl; `features` are read from the environment."""

    task: str | None = "tabletop"
    """Option of embodyrl's `env=`, for example tabletop or libero_object."""
    fps: int = 20
    overrides: list[str] = field(default_factory=list)
    """Overrides as for `embodyrl eval`, for example ["env.eval.task_ids=[0]"]."""
    python: str | None = None
    """Interpreter that has embodyrl; default: the variable EMBODYRL_PYTHON, else this interpreter."""
    timeout_s: float = 300.0
    """Limit of each reply of the simulator in seconds."""

    def __post_init__(self) -> None:
        """Read cameras, state and actions from the environment."""
        worker = start_simulator(str(self.task), self.overrides, self.python, self.timeout_s)
        worker.close()
        layout = worker.description
        if layout["kind"] != "box":
            raise ValueError(f"--env.task={self.task} has {layout['kind']} actions; LeRobot's policies output numbers.")
        shape = layout["action_low"].shape
        self.features = {ACTION: PolicyFeature(type=FeatureType.ACTION, shape=shape)}
        self.features_map = {ACTION: ACTION}
        if layout["state_dim"]:
            self.features["agent_pos"] = PolicyFeature(type=FeatureType.STATE, shape=(layout["state_dim"],))
            self.features_map["agent_pos"] = OBS_STATE
        for name in layout["cameras"]:
            self.features[f"pixels/{name}"] = PolicyFeature(type=FeatureType.VISUAL, shape=(*layout["size"], 3))
            self.features_map[f"pixels/{name}"] = f"{OBS_IMAGES}.{name}"

    @property
    def package_name(self) -> str:
        """Package that registers the environment."""
        return "lerobot_env_embodyrl"

    @property
    def gym_id(self) -> str:
        """Gymnasium id of every environment of embodyrl."""
        return GYM_ID

    @property
    def gym_kwargs(self) -> dict:
        """Arguments of the constructor."""
        return {"task": self.task, "overrides": self.overrides, "python": self.python, "timeout_s": self.timeout_s}
