"""Run plan: environment, policy, algorithm and workers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.channels.layout import RecordLayout
from embodyrl.cluster.protocol import place_rank
from embodyrl.devices import Devices, Gpus
from embodyrl.envs.protocol import EnvContext, env_costs
from embodyrl.envs.settings import EnvSettings
from embodyrl.plan.memory_plan import MemoryPlan
from embodyrl.plan.schema import Config
from embodyrl.policies.protocol import estimate_policy_costs
from embodyrl.types import EnvCosts, EnvSpec, PolicyCosts, PolicySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvs:
    """Name and environment indices of an env worker; environments are numbered over all workers."""

    name: str
    env_indices: range


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Complete description of a run, built before any process starts."""

    cfg: Config
    env_settings: EnvSettings
    """Settings of the environment, with the cameras used by policy and reward."""
    context: EnvContext
    env: EnvSpec
    policy: PolicySpec
    algorithm: Algorithm | None
    """Training algorithm; None: evaluation only."""
    layout: RecordLayout
    capacity: int
    """Number of records in shared memory: the maximum in use during a rollout."""
    env_workers: tuple[WorkerEnvs, ...]
    total_steps: int
    """Number of training steps."""
    optimizer_steps_per_training_step: int
    """Number of optimizer steps per training step if the step has `max_samples` samples."""
    max_samples: int
    """Maximum number of samples (action chunks) of one training step."""
    ranks: int
    """Number of processes that train the policy."""
    devices: Devices
    gpus: Gpus = field(default_factory=Gpus, compare=False)
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    nodes: Mapping[str, tuple[int, ...]]
    """Host numbers of the processes of each component; 0 is the driver's host."""
    single_step: bool = False
    """True if each record contains one env step instead of a chunk."""
    labeled: bool = False
    """True if each record contains the expert's action for the same state in addition to the policy's action."""

    def policy_node(self, process_index: int) -> int:
        """Return the host number of a policy process; actor ranks are first, then rollout processes."""
        return place_policy(self.nodes, process_index, self.ranks)

    def env_node(self, process_index: int) -> int:
        """Return the host number of an env worker."""
        return self.nodes["env"][process_index % len(self.nodes["env"])]

    @property
    def env_workers_per_node(self) -> int:
        """Maximum number of env workers per host."""
        return -(-len(self.env_workers) // len(self.nodes["env"]))

    @property
    def is_disaggregated(self) -> bool:
        """True if rollouts and training run in different processes; always False without training."""
        return self.algorithm is not None and self.cfg.rollout_processes > 0

    @property
    def policy_costs(self) -> PolicyCosts:
        """Estimated number of parameters, memory and compute of the policy."""
        return estimate_policy_costs(self.cfg.model, self.env, self.policy.value_dim)

    @property
    def env_costs(self) -> EnvCosts:
        """Estimated memory and time of the environment."""
        return env_costs(self.cfg.env, self.env)

    @property
    def num_envs(self) -> int:
        """Number of environments of all env workers."""
        return self.env_workers[-1].env_indices.stop


def place_policy(nodes: Mapping[str, tuple[int, ...]], process_index: int, ranks: int) -> int:
    """Return the host number of a policy process; actor ranks are first, then rollout processes."""
    if process_index < ranks:
        return place_rank(process_index, ranks, nodes["actor"])
    return nodes["rollout"][(process_index - ranks) % len(nodes["rollout"])]
