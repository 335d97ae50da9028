"""What a policy host is told before it starts. Apart from it, because the driver, which writes this, loads no torch."""

from dataclasses import dataclass, field

from embodyrl.algorithms.settings import AlgorithmSettings
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.settings import ModelSettings
from embodyrl.workers.lifecycle import WorkerInit
from embodyrl.workers.messages import RankInfo
from embodyrl.workers.settings import ActorSettings, ObjectiveSettings, SupervisedActorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHostInit(WorkerInit):
    """What the process that holds the policy needs to start."""

    model: ModelSettings
    algorithm: AlgorithmSettings | None = None
    """None: nothing is trained, or by supervision."""
    longest_episode: int = 1
    """Chunks of an episode that its time limit ends."""
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    """Of supervised training."""
    critic: str | None = None
    """Folder of a critic apart."""
    actor: SupervisedActorSettings = field(default_factory=ActorSettings)
    seed: int
    deterministic: bool = False
    skips_nonfinite: bool = False
    request: PolicyRequest
    """Its device is chosen where the policy is built."""
    total_steps: int
    """Training steps of the whole run."""
    threads: int
    rank_info: RankInfo = field(default_factory=RankInfo)
    acts: bool = True
    trains: bool
    sharded: bool = False
    """The ranks that train are FSDP's."""
    start_from: str | None = None
    """Folder of weights in the policy's own layout that replace those of `model.path`."""
