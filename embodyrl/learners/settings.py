"""Keys of the actor."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from embodyrl.config.settings import Count, CountOrAll, Index, Path, Positive, Settings, Share

Rate = Annotated[float, Field(ge=0, le=1000)]
Decay = Annotated[float, Field(ge=0, lt=1)]


Objective = StrEnum("Objective", ["imitation", "dpo", "preference", "success"])
PAIRED = (Objective.dpo, Objective.preference)


class ObjectiveSettings(Settings):
    """What supervised training minimises."""

    learner: ClassVar[str] = "embodyrl.extensions.demonstrations.imitation:ImitationLearner"
    """package.module:class of the learner (`learners/protocol.py`)."""
    needs = {"name=dpo": "beta reference_path", "name=dpo|preference": "label_smoothing"}

    name: Objective = Objective.imitation
    """imitation of actions and answers; dpo: prefer the better of two answers, or of two episodes that began alike,
    chunk by chunk; preference, success: a value head
    becomes a reward model (reward.path), from pairs of answers or from which frames of episodes show success."""
    beta: Positive = 0.1
    """dpo: weight of the log-ratios, large stays close to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """dpo, preference: share of the pairs whose labels are taken to be wrong."""
    reference_path: Path | None = None
    """dpo: weights of the reference; default those at the start."""

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss compares the policy with a reference policy."""
        return self.name is Objective.dpo

    @property
    def of_pairs(self) -> bool:
        """It wants rows with two answers."""
        return self.name in PAIRED

    @property
    def rates(self) -> bool:
        """It trains a value head as a reward model."""
        return self.name in (Objective.preference, Objective.success)


class CriticSettings(Settings):
    """Who values what is written."""

    path: Path | None = None
    """Language models: folder of a critic apart, in the model's public layout, with the same tokens; trained with
    actor.optim.value_lr. Default: a value head on the policy."""


class FsdpSettings(Settings):
    """How many processes hold the policy, and how they share its weights."""

    size: CountOrAll = -1
    """Actor ranks; -1: one per GPU of this host, or one without GPUs and where only one works."""
    shard_size: CountOrAll = -1
    """Ranks that share one copy of the weights, the others replicate it (HSDP); -1: all ranks; 1: replicas only."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass (less memory, more communication)."""
    gradient_sync: Literal["auto", "step", "micro_batch"] = "auto"
    """When ranks add up their gradients: once a step (whole ones wait on every rank), after each micro_batch (less
    memory, more communication), or auto: once a step where the GPUs have the memory for it."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory."""


class OptimSettings(Settings):
    """AdamW and its schedule."""

    needs = {"schedule=linear|cosine|wsd": "min_lr_ratio", "schedule=wsd": "decay_ratio"}

    lr: Rate = 1.0e-4
    """Learning rate."""
    value_lr: Rate = 3.0e-3
    """Learning rate of the value head."""
    value_clip_grad: Positive | None = None
    """Gradient norm limit of the value head alone; null: one limit for the gradient of all weights together."""
    adam_beta1: Decay = 0.9
    """AdamW: decay of the gradient mean."""
    adam_beta2: Decay = 0.999
    """AdamW: decay of the squared gradient."""
    adam_eps: Positive = 1.0e-5
    """AdamW: added to the denominator."""
    weight_decay: Rate = 0.0
    """AdamW: decoupled weight decay; SAC: of the policy, critics and temperature have none."""
    clip_grad: Positive = 1.0
    """Gradient norm limit."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """constant, linear, cosine, or wsd (constant, then linear over decay_ratio), over runner.max_steps. SAC: this and
    the warm-up are of the policy's rate; critics (value_lr) and temperature (lr) keep theirs."""
    warmup_steps: Index | None = None
    """Optimizer steps of linear warm-up; default: the model's own (train: 10 of flow policies, else none)."""
    warmup_ratio: Share = 0.0
    """Share of the run's training steps over which the rate rises, in place of warmup_steps."""
    min_lr_ratio: Share = 0.0
    """Share of the learning rate at which linear, cosine and wsd end."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    """wsd: share of the run, at its end, over which the rate falls."""

    def problems(self) -> Iterator[str]:
        """One warm-up."""
        yield from super().problems()
        if self.warmup_steps and self.warmup_ratio:
            yield (
                f"actor.optim.warmup_steps={self.warmup_steps} and actor.optim.warmup_ratio={self.warmup_ratio}: one "
                "of them says how long the warm-up is; set the other to 0."
            )


class ActorSettings(Settings):
    """The processes that train the policy."""

    needs = {"minibatches=null": "global_batch_size"}

    micro_batch_size: Count = 8
    """Chunk samples per forward."""
    global_batch_size: Count = 160
    """Chunk samples per optimizer step."""
    minibatches: Count | None = None
    """Optimizer steps per pass over what a training step collected, of equal size, in place of global_batch_size."""
    max_tokens_per_mbs: Count | None = None
    """Text: tokens per forward, padding included, in place of micro_batch_size; samples are sorted by length."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    fsdp: FsdpSettings = FsdpSettings()
    optim: OptimSettings = OptimSettings()

    def problems(self) -> Iterator[str]:
        """A part is not larger than the whole, and ranks come in whole copies of the weights."""
        if self.micro_batch_size > self.global_batch_size:
            yield (
                f"actor.micro_batch_size={self.micro_batch_size} is larger than actor.global_batch_size="
                f"{self.global_batch_size}, of which it is a part. Use actor.micro_batch_size={self.global_batch_size}."
            )
        fsdp = self.fsdp
        if fsdp.size > 0 and fsdp.shard_size > 0 and fsdp.size % fsdp.shard_size:
            yield (
                f"actor.fsdp.size={fsdp.size} is not a multiple of actor.fsdp.shard_size={fsdp.shard_size}: every copy "
                "of the weights needs as many ranks. Use actor.fsdp.shard_size=-1."
            )
