"""Config keys for the actor."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from embodyrl.config.settings import Count, CountOrAll, Index, Path, Positive, Settings, Share

Rate = Annotated[float, Field(ge=0, le=1000)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class CriticSettings(Settings):
    """Config keys for the critic of a language model."""

    path: Path | None = None
    """Folder of a separate critic for language models, in Hugging Face format; default: a value head on the policy. The
    critic needs the policy's tokenizer; its learning rate is actor.optim.value_lr."""


class FsdpSettings(Settings):
    """Config keys for the training processes and for weight sharding."""

    size: CountOrAll = -1
    """Number of actor ranks (training processes). -1: one per GPU of this host; 1 without GPUs, or if the run supports
    one rank only."""
    shard_size: CountOrAll = -1
    """Number of ranks over which one copy of the weights is sharded; every group of ranks has its own copy (HSDP). -1:
    all ranks; 1: no sharding."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass (less memory, more communication)."""
    gradient_sync: Literal["auto", "step", "micro_batch"] = "auto"
    """Frequency of gradient reduction. step: once per optimizer step; every rank stores full gradients. micro_batch:
    less memory, more communication. auto: step if the GPU memory suffices."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory (FSDP CPU offload)."""


class OptimSettings(Settings):
    """Config keys for AdamW and its learning-rate schedule."""

    keys_by_condition = {"schedule=linear|cosine|wsd": "min_lr_ratio", "schedule=wsd": "decay_ratio"}

    lr: Rate = 1.0e-4
    """Learning rate."""
    value_lr: Rate = 3.0e-3
    """Learning rate of the value head or the critics."""
    value_clip_grad: Positive | None = None
    """Maximum gradient norm of the value head; null: clip_grad limits the norm of all weights together."""
    adam_beta1: Decay = 0.9
    """AdamW: decay rate of the first moment."""
    adam_beta2: Decay = 0.999
    """AdamW: decay rate of the second moment."""
    adam_eps: Positive = 1.0e-5
    """AdamW: epsilon in the denominator."""
    weight_decay: Rate = 0.0
    """AdamW: decoupled weight decay; SAC applies it to the policy only."""
    clip_grad: Positive = 1.0
    """Maximum gradient norm; larger gradients are scaled down."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning-rate schedule over runner.max_steps: constant, linear, cosine, or wsd (constant, then linear over
    decay_ratio). SAC applies it to the policy only; critics (value_lr) and temperature (lr) have constant rates."""
    warmup_steps: Index | None = None
    """Number of optimizer steps of linear warm-up; default: 10 in `embodyrl train` if model.path is set, otherwise
    0."""
    warmup_ratio: Share = 0.0
    """Warm-up as a fraction of the training steps, instead of warmup_steps."""
    min_lr_ratio: Share = 0.0
    """Final learning rate as a fraction of lr, for linear, cosine and wsd."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    """With schedule=wsd: fraction of the training steps, at the end of the run, in which the learning rate decays."""

    @property
    def adam(self) -> dict[str, Any]:
        """Arguments of AdamW except the learning rate and the weight decay."""
        return {"betas": (self.adam_beta1, self.adam_beta2), "eps": self.adam_eps}

    def problems(self) -> Iterator[str]:
        """Yield one error per contradiction between settings."""
        yield from super().problems()
        if self.warmup_steps and self.warmup_ratio:
            yield (
                f"actor.optim.warmup_steps={self.warmup_steps} and actor.optim.warmup_ratio={self.warmup_ratio}: both "
                f"set the length of the warm-up; set one of them to 0."
            )


class ActorSettings(Settings):
    """Config keys for the processes that train the policy."""

    micro_batch_size: Count = 8
    """Micro-batch size: number of samples (action chunks) per forward pass."""
    global_batch_size: Count = 160
    """Number of samples (action chunks) per optimizer step, over all ranks."""
    minibatches: Count | None = None
    """Number of equal minibatches (optimizer steps) per pass over the collected batch; replaces global_batch_size."""
    max_tokens_per_mbs: Count | None = None
    """Text tasks: maximum number of tokens per forward pass, including padding; replaces micro_batch_size. Samples are
    sorted by length."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, which saves memory and takes more time."""
    fsdp: FsdpSettings = FsdpSettings()
    optim: OptimSettings = OptimSettings()

    def problems(self) -> Iterator[str]:
        """Yield one error per contradiction between settings."""
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
