"""Config keys for the actor."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from embodyrl.config.settings import Count, CountOrAll, Index, Path, Positive, Settings, Share

Rate = Annotated[float, Field(ge=0, le=1000)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class CriticSettings(Settings):
    """Config keys for the critic of a language model."""

    path: Path | None = None
    """Language models: folder of a separate critic in Hugging Face format. Its tokenizer must match the policy; its
    learning rate is actor.optim.value_lr. Default: a value head on the policy."""


class FsdpSettings(Settings):
    """Config keys for the training processes and for weight sharding."""

    size: CountOrAll = -1
    """Number of actor ranks; -1: one per GPU of this host. Without GPUs, or if the policy supports only one rank: 1."""
    shard_size: CountOrAll = -1
    """Number of ranks that share one copy of the weights; other groups of ranks have replicas (HSDP).
    -1: all ranks; 1: replicas only."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass (less memory, more communication)."""
    gradient_sync: Literal["auto", "step", "micro_batch"] = "auto"
    """Synchronisation of gradients: once per step (every rank stores full gradients), per micro_batch (less memory,
    more communication), or auto: once per step if the GPUs have the memory."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory."""


class OptimSettings(Settings):
    """Config keys for AdamW and its learning-rate schedule."""

    needs = {"schedule=linear|cosine|wsd": "min_lr_ratio", "schedule=wsd": "decay_ratio"}

    lr: Rate = 1.0e-4
    """Learning rate."""
    value_lr: Rate = 3.0e-3
    """Learning rate of the value head or the critics."""
    value_clip_grad: Positive | None = None
    """Gradient norm limit of the value head; null: one limit for the gradient of all weights."""
    adam_beta1: Decay = 0.9
    """AdamW: decay rate of the first moment."""
    adam_beta2: Decay = 0.999
    """AdamW: decay rate of the second moment."""
    adam_eps: Positive = 1.0e-5
    """AdamW: epsilon in the denominator."""
    weight_decay: Rate = 0.0
    """AdamW: decoupled weight decay; with SAC, only for the policy."""
    clip_grad: Positive = 1.0
    """Gradient norm limit."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning-rate schedule over runner.max_steps: constant, linear, cosine, or wsd (constant, then linear over
    decay_ratio). SAC: for the policy only; critics (value_lr) and temperature (lr) have constant rates."""
    warmup_steps: Index | None = None
    """Optimizer steps of linear warm-up; default: set by the model (train: 10 for flow, diffusion and ACT policies,
    otherwise 0).
    """
    warmup_ratio: Share = 0.0
    """Warm-up as a fraction of the training steps, instead of warmup_steps."""
    min_lr_ratio: Share = 0.0
    """Final learning rate as a fraction of lr, for linear, cosine and wsd."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    """wsd: final fraction of the training steps in which the learning rate decays."""

    def problems(self) -> Iterator[str]:
        """Yield contradictory settings, one line each."""
        yield from super().problems()
        if self.warmup_steps and self.warmup_ratio:
            yield (
                f"actor.optim.warmup_steps={self.warmup_steps} and actor.optim.warmup_ratio={self.warmup_ratio}: both "
                f"set the length of the warm-up; set one of them to 0."
            )


class ActorSettings(Settings):
    """Config keys for the processes that train the policy."""

    needs = {"minibatches=null": "global_batch_size"}

    micro_batch_size: Count = 8
    """Micro-batch size: chunk samples per forward pass."""
    global_batch_size: Count = 160
    """Chunk samples per optimizer step."""
    minibatches: Count | None = None
    """Optimizer steps of equal size per pass over the collected batch, instead of global_batch_size."""
    max_tokens_per_mbs: Count | None = None
    """Text: tokens per forward pass including padding, instead of micro_batch_size; samples are sorted by length."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    fsdp: FsdpSettings = FsdpSettings()
    optim: OptimSettings = OptimSettings()

    def problems(self) -> Iterator[str]:
        """Yield contradictory settings, one line each."""
        if self.micro_batch_size > self.global_batch_size:
            yield (
                f"actor.micro_batch_size={self.micro_batch_size} is larger than actor.global_batch_size="
                f"{self.global_batch_size}. Use actor.micro_batch_size={self.global_batch_size}."
            )
        fsdp = self.fsdp
        if fsdp.size > 0 and fsdp.shard_size > 0 and fsdp.size % fsdp.shard_size:
            yield (
                f"actor.fsdp.size={fsdp.size} is not a multiple of actor.fsdp.shard_size={fsdp.shard_size}, the "
                f"number of ranks per copy of the weights. Use actor.fsdp.shard_size=-1."
            )
