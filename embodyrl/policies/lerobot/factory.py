"""Base factory of LeRobot's imitation policies. Importing this module does not import torch."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from embodyrl.config.paths import resolve_asset
from embodyrl.config.shared import Precision
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.files import check_equal
from embodyrl.policies.inputs import INPUTS_FILE
from embodyrl.policies.lerobot.config import LeRobotConfig, read_config
from embodyrl.policies.lerobot.settings import LeRobotSettings
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.policies.steering.settings import SteeringShape, add_steering, add_steering_costs
from embodyrl.policies.vla.folder import CONFIG_FILE, WEIGHTS_FILE, has_random_init
from embodyrl.policies.vla.processors import find_camera_order_problem
from embodyrl.policies.vla.records import ChunkRecord
from embodyrl.policies.vla.weights import count_parameters, get_weight_sizes
from embodyrl.types import EnvSpec, InputSpec, PolicyCosts, PolicySpec

S = TypeVar("S", bound=LeRobotSettings)
C = TypeVar("C", bound=LeRobotConfig)
_MAY_DIFFER = (
    *("n_action_steps", "normalization_mapping", "dropout", "kl_weight", "temporal_ensemble_coeff"),
    *("noise_scheduler_type", "num_inference_steps", "crop_is_random", "do_mask_loss_for_padding"),
)
"""Keys of config.json that do not affect the shape or meaning of weights."""


class LeRobotFactory(ABC, Generic[S, C]):
    """Base class of factories for policies in LeRobot's layout; subclasses add config, sizes and network.

    Implements `PolicyFactory`.
    """

    kind: ClassVar[str]
    config: type[C]
    settings: type[S]
    network: ClassVar[str]
    """Class of the network, as package.module:class; the constructor's only argument is the config."""

    @abstractmethod
    def num_features(self, config: C) -> int:
        """Return the number of input features of value heads and actors."""

    @abstractmethod
    def num_actor_values(self, cfg: S, config: C) -> int:
        """Return the number of noise or latent values that the DSRL actor outputs per chunk."""

    @abstractmethod
    def record(self, cfg: S, config: C) -> ChunkRecord:
        """Return the token layout of a sampled chunk."""

    def num_passes(self, config: C) -> int:
        """Return the number of forward passes per chunk."""
        return 1

    @abstractmethod
    def policy(self, steering: SteeringShape | None) -> type[Any]:
        """Return the policy class. `steering` contains the sizes of the actor for a frozen network; None: no actor."""

    def validate(self, cfg: S) -> list[str]:
        """Return config errors with fixes, one line each."""
        problems = []
        if cfg.precision is not Precision.fp32:
            problems.append(f"model.precision={cfg.precision}: {self.kind} computes in fp32; set model.precision=fp32.")
        try:
            folder = self.folder(cfg)
            config = read_config(folder, self.kind, self.config)
            if config.input_features and (problem := self._with_num_actions(cfg, config).find_problem()):
                problems.append(f"model.num_action_chunks={cfg.num_action_chunks}: {problem}; lower it.")
            if not has_random_init(folder) and not (folder / WEIGHTS_FILE).is_file():
                problems.append(f"model.path: {folder} contains no {WEIGHTS_FILE}; download the weights too.")
        except (CheckpointError, ConfigError) as error:
            problems.append(str(error))
        return problems

    def folder(self, cfg: S) -> Path:
        """Return the folder of `model.path`.

        Raises:
            ConfigError: the key is not set, or its value is not a folder.
        """
        folder = None if cfg.path is None else resolve_asset(cfg.path)
        if folder is None or not folder.is_dir():
            raise ConfigError(
                f"model.path={cfg.path} is not a folder. Use the folder of a LeRobot {self.kind} policy with "
                f"{CONFIG_FILE}, {WEIGHTS_FILE} and the files of both processors. Use assets/{self.kind} for random "
                "weights."
            )
        return folder

    def spec(self, cfg: S, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Return the policy spec, read from the folder's config.json.

        Raises:
            ConfigError: checkpoint and environment do not fit.
            CheckpointError: config.json is missing or malformed.
        """
        config = self.plan(cfg, env)
        saved = read_config(self.folder(cfg), self.kind, self.config)
        executed = saved.n_action_steps
        warnings: tuple[str, ...] = ()
        if saved.input_features and executed != cfg.num_action_chunks:
            warnings = (
                f"the checkpoint executes {executed} actions per query (n_action_steps), but model.num_action_chunks="
                f"{cfg.num_action_chunks}",
            )
        record = self.record(cfg, config)
        spec = PolicySpec(
            name=self.kind,
            num_action_chunks=cfg.num_action_chunks,
            action_dim=config.action_dim,
            tokens_per_chunk=record.tokens,
            scored=record.per_action,
            imitated=config.horizon_length - config.first_executed,
            value_dim=value_dim,
            inputs=InputSpec(
                num_images=config.n_obs_steps * len(config.cameras),
                state=config.state_dim + config.environment_dim > 0,
                rotates_images=True,
            ),
            observed_steps=config.n_obs_steps,
            gripper=env.action.gripper,
            warnings=warnings,
        )
        return add_steering(spec, self.steering(cfg, config), cfg, self.folder(cfg))

    def describe_checkpoint(self, cfg: S, env: EnvSpec) -> list[tuple[str, str]]:
        """Return (label, text) pairs that describe the checkpoint's files (see `PolicyFactory.describe_checkpoint`)."""
        config = self.plan(cfg, env)
        modes = ", ".join(f"{kind} {mode}" for kind, mode in config.normalization_mapping.items())
        height, width = config.image_size
        return [
            ("statistics", modes),
            ("images", f"{', '.join(config.cameras) or 'none'}, {height}x{width} pixels, RGB"),
        ]

    def costs(self, cfg: S, env: EnvSpec, value_dim: int) -> PolicyCosts:
        """Return the number of parameters and of forward passes per chunk."""
        config = self.plan(cfg, env)
        costs = PolicyCosts(
            num_parameters=count_parameters(get_weight_sizes(self.network, config)), act_passes=self.num_passes(config)
        )
        return add_steering_costs(costs, self.steering(cfg, config))

    def steering(self, cfg: S, config: C) -> SteeringShape | None:
        """Return the sizes of the actor for a frozen network; None if the network itself is trained."""
        if not cfg.is_steered:
            return None
        features = self.num_features(config)
        if cfg.is_residual:
            return SteeringShape.for_residual(cfg, features, config.action_dim)
        num_values = self.num_actor_values(cfg, config)
        return SteeringShape.for_noise(features, num_values, actions=config.n_action_steps, bound=cfg.noise_bound)

    def compare(self, cfg: S, env: EnvSpec, folder: Path) -> None:
        """Check that the sizes of network and actor match a folder (see `PolicyFactory.compare`)."""
        config = self.plan(cfg, env)
        saved_config = read_config(folder, self.kind, self.config)
        # With temporal ensembling, one action of the environment is a whole chunk.
        single_env = replace(env, action=replace(env.action, dim=config.action_dim))
        if saved_config.input_features and (problems := saved_config.find_mismatches(single_env)):
            raise CheckpointError("; ".join(problem.rstrip(".") for problem in problems) + ".")
        expected, fix = config.model_dump(exclude={*_MAY_DIFFER}), "Use the environment and model.path of its training."
        check_equal(saved_config.model_dump(), expected, folder / CONFIG_FILE, fix)
        if (shape := self.steering(cfg, config)) is not None:
            shape.check(folder)

    def build(self, cfg: S, request: PolicyRequest) -> Policy:
        """Build the policy with the weights in `cfg.path`, or with random weights from the seed.

        Raises:
            CheckpointError: a file is missing, damaged or does not fit.
        """
        import torch

        from embodyrl.policies.lerobot.files import read_files
        from embodyrl.policies.steering.actor import ModuleWithHeads

        spec, folder = self.spec(cfg, request.env, request.value_dim), self.folder(cfg)
        config = self.plan(cfg, request.env)
        steering = self.steering(cfg, config)
        policy_class = self.policy(steering)
        files = read_files(folder, config, self.kind, policy_class.prefix, cfg)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(request.seed)
            module = ModuleWithHeads(pkgutil.resolve_name(self.network)(config))
            module.add_value_head(self.num_features(config), request.value_dim)
            module.add_actor(steering)
        policy = policy_class(spec, cfg, config, module, files, request)
        if not has_random_init(folder):
            policy.load_weights(folder)
        return policy

    def plan(self, cfg: S, env: EnvSpec) -> C:
        """Return the config of the policy for an environment.

        Raises:
            ConfigError: checkpoint and environment do not fit.
            CheckpointError: config.json is missing or malformed.
        """
        folder = self.folder(cfg)
        config = read_config(folder, self.kind, self.config)
        if not config.input_features:
            config = config.fit_to(env, cfg.num_action_chunks)
        config = self._with_num_actions(cfg, config)
        if problem := config.find_problem():
            raise ConfigError(f"model={self.kind} in env '{env.name}': {problem}.")
        if problems := config.find_mismatches(env):
            raise ConfigError(problems)
        last = slice((config.n_obs_steps - 1) * len(config.cameras), config.n_obs_steps * len(config.cameras))
        problem = find_camera_order_problem(config.cameras, env.cameras.names, env.cameras.names[last])
        if problem and cfg.cameras is None and not (folder / INPUTS_FILE).is_file():
            raise ConfigError(f"model={self.kind} in env '{env.name}': {problem}")
        return config

    def _with_num_actions(self, cfg: S, config: C) -> C:
        return config.model_copy(update={"n_action_steps": cfg.num_action_chunks})
