"""LeRobot policies in a separate process. Importing this package does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.lerobot.config import IMAGES
from embodyrl.policies.lerobot.process.checkpoint import Checkpoint, read_checkpoint
from embodyrl.policies.lerobot.process.settings import LeRobotProcessSettings
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.steering.settings import SHAPE_FILE
from embodyrl.types import EnvSpec, InputSpec, PolicySpec

if TYPE_CHECKING:
    from embodyrl.policies.lerobot.process.policy import LeRobotPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class LeRobotProcessFactory:
    """Factory of policies that run in a separate process with LeRobot; implements `PolicyFactory`."""

    settings: type[LeRobotProcessSettings] = LeRobotProcessSettings
    """Settings class of the keys under `model`."""

    def validate(self, cfg: LeRobotProcessSettings) -> list[str]:
        """Return config errors with fixes, one line each."""
        try:
            read_checkpoint(_get_folder(cfg))
        except (ConfigError, CheckpointError) as error:
            return [str(error)]
        return []

    def spec(self, cfg: LeRobotProcessSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Return the policy spec, read from config.json.

        Raises:
            ConfigError: checkpoint and environment do not fit.
            CheckpointError: config.json is missing or malformed.
        """
        saved = read_checkpoint(_get_folder(cfg))
        if problems := _find_mismatches(cfg, saved, env):
            raise ConfigError(problems)
        executed, warnings = cfg.num_action_chunks, ()
        if executed < saved.n_action_steps:
            warnings = (
                f"the checkpoint executes {saved.n_action_steps} actions per query (n_action_steps), but "
                f"model.num_action_chunks={executed}",
            )
        return PolicySpec(
            name=saved.type,
            num_action_chunks=executed,
            action_dim=saved.action_dim,
            tokens_per_chunk=executed * saved.action_dim,
            inputs=InputSpec(
                num_images=len(env.cameras.names) if saved.cameras else 0,
                state=saved.state_dim > 0,
                instructions=True,
                rotates_images=True,
            ),
            observed_steps=saved.n_obs_steps,
            gripper=env.action.gripper,
            is_stochastic=False,
            untrainable="its weights are in a process of LeRobot, which returns actions without probabilities",
            warnings=warnings,
        )

    def build(self, cfg: LeRobotProcessSettings, request: PolicyRequest) -> LeRobotPolicy:
        """Start the LeRobot process and load the policy.

        Raises:
            ConfigError: training was requested.
            EmbodyError: LeRobot is missing, or cannot load the policy.
        """
        from embodyrl.policies.lerobot.process.policy import LeRobotPolicy

        spec, folder = self.spec(cfg, request.env, request.value_dim), _get_folder(cfg)
        saved = read_checkpoint(folder)
        return LeRobotPolicy(cfg, spec, request, folder, saved, find_camera_indices(cfg, saved, request.env))


def find_camera_indices(cfg: LeRobotProcessSettings, saved: Checkpoint, env: EnvSpec) -> tuple[int, ...]:
    """Return the index of each camera of the checkpoint among the environment's cameras of one observation step."""
    known = env.cameras.names[-(len(env.cameras.names) // saved.n_obs_steps) :]
    camera_names = cfg.cameras or [name.removeprefix(IMAGES) for name in saved.cameras]
    if cfg.cameras or {*camera_names} <= {*known}:
        return tuple(known.index(name) for name in camera_names)
    return tuple(range(len(camera_names)))


def _find_mismatches(cfg: LeRobotProcessSettings, saved: Checkpoint, env: EnvSpec) -> list[str]:
    """Return the mismatches between checkpoint and environment, one line each."""
    steps, problems = saved.n_obs_steps, []
    if cfg.num_action_chunks > saved.n_action_steps:
        problems.append(
            f"model.num_action_chunks={cfg.num_action_chunks}: the checkpoint executes {saved.n_action_steps} actions "
            f"per query. Set model.num_action_chunks={saved.n_action_steps}."
        )
    if steps > 1 and env.history != steps:
        problems.append(f"the checkpoint observes {steps} steps. Set env.history={steps}.")
        return problems
    names = env.cameras.names[-(len(env.cameras.names) // steps) :] if env.cameras.names else ()
    if unknown := [name for name in cfg.cameras or () if name not in names]:
        problems.append(f"model.cameras: {unknown} are not cameras of env '{env.name}'. Known: {', '.join(names)}.")
    if len(cfg.cameras or saved.cameras) != len(saved.cameras) or len(saved.cameras) > len(names):
        problems.append(
            f"the checkpoint needs {len(saved.cameras)} cameras ({', '.join(saved.cameras)}), but env '{env.name}' has "
            f"{', '.join(names) or 'none'}. Set env.init_params.camera_names, or model.cameras with one name for each."
        )
    known = [name for name in saved.cameras if name.removeprefix(IMAGES) in names]
    if not cfg.cameras and 0 < len(known) < len(saved.cameras):
        problems.append(
            f"the checkpoint needs {', '.join(saved.cameras)}, but only {', '.join(known)} is a camera of env "
            f"'{env.name}' ({', '.join(names)}). Set model.cameras to one camera of env for each, in this order."
        )
    if saved.action_dim != env.action.dim:
        problems.append(
            f"the checkpoint returns actions with {saved.action_dim} dimensions, but env '{env.name}' has "
            f"{env.action.dim}. Choose another environment or checkpoint."
        )
    if saved.state_dim and saved.state_dim * steps != env.state_dim:
        problems.append(
            f"the checkpoint needs a state with {saved.state_dim} dimensions, but env '{env.name}' has "
            f"{env.state_dim // steps}. Choose another environment or checkpoint."
        )
    return problems


def _get_folder(cfg: LeRobotProcessSettings) -> Path:
    folder = None if cfg.path is None else resolve_asset(cfg.path)
    if folder is None or not folder.is_dir():
        raise ConfigError(
            f"model.path={cfg.path} is not a folder. Set model.path to the folder of a LeRobot policy, for example "
            "checkpoints/last/pretrained_model of lerobot-train."
        )
    if (folder / SHAPE_FILE).is_file():
        raise CheckpointError(
            f"{folder / SHAPE_FILE}: this version does not run actors on a policy in a LeRobot process. Set model.path "
            "to the folder of the policy without the actor."
        )
    return folder


FACTORY = LeRobotProcessFactory()
