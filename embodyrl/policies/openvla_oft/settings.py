"""Keys of OpenVLA and OpenVLA-OFT."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from embodyrl.config.settings import Count, Positive, Share
from embodyrl.policies.settings import AdapterSettings
from embodyrl.policies.steering.settings import ResidualSettings, SteeringShape
from embodyrl.policies.vla.records import ChunkRecord, ChunkShape, Stochastic

Normalization = StrEnum("Normalization", ["bounds_q99", "bounds"])
ImagePipeline = StrEnum("ImagePipeline", ["rlinf", "official"])
ActionHead = StrEnum("ActionHead", ["discrete", "l1", "diffusion"])
Likelihood = StrEnum("Likelihood", ["head", "residual"])


class OpenVlaSettings(AdapterSettings):
    """OpenVLA: one action per query, token by token."""

    action_dim: Count = 7
    """A: dimensions of one action."""
    unnorm_key: str | None = None
    """Key of the action statistics; default: the environment's own."""
    num_images_in_input: Annotated[int, Field(ge=1, le=64)] = 1
    """Camera images per query."""
    cameras: list[str] | None = None
    """Names of the environment's cameras that show what the checkpoint's cameras showed, in the checkpoint's order;
    default: the names that it was trained with."""
    action_normalization: Normalization = Normalization.bounds_q99
    """Statistics that stand for -1 and 1 of actions and proprioception: bounds_q99 (q01, q99) or bounds (min, max)."""
    image_pipeline: ImagePipeline = ImagePipeline.rlinf
    """Preprocessing the checkpoint was trained with: rlinf (bicubic) or official (JPEG, lanczos, 0.9 crop)."""
    rope_bf16_table: bool = False
    """Round the rotary frequencies to bfloat16, as RLinf does; only for checkpoints that were trained so."""
    freeze: list[str] = []
    """Parameters that stay as they are: patterns of names, for example [vision_backbone.*]."""
    compile: bool = False
    """Compile the model with torch.compile (slow first steps)."""
    cuda_graphs: bool = False
    """GPU: act by replaying recorded forward passes, one for each size of batch (not run on a GPU yet)."""

    def problems(self) -> Iterator[str]:
        """One way to run the kernels."""
        yield from super().problems()
        if self.compile and self.cuda_graphs:
            yield "model.compile=true and model.cuda_graphs=true: one of them; a compiled model is not recorded."


class OftSettings(OpenVlaSettings, ResidualSettings):
    """OpenVLA-OFT: a whole chunk at once."""

    needs = {
        "likelihood!=residual": "freeze compile",
        "action_head=discrete": "cuda_graphs",
        "action_head=l1": "action_std",
        "action_head=diffusion": "num_diffusion_steps_inference stochastic_steps diffusion_eta diffusion_min_std",
    }

    use_proprio: bool = False
    """Feed proprioception."""
    append_stop: bool = True
    """Put the STOP token after the action placeholders, as the original training did."""
    action_head: ActionHead = ActionHead.discrete
    """discrete tokens, or the continuous heads l1 and diffusion."""
    likelihood: Likelihood = Likelihood.head
    """Where log-probabilities for RL come from: the action head (head). Or the model is frozen, and an actor learns to
    correct the chunk that it would choose greedily (residual)."""
    action_std: Positive = 0.1
    """l1: standard deviation of normalised actions (-1..1) with which RL starts; it is learned."""
    num_diffusion_steps_inference: Annotated[int, Field(ge=1, le=50)] = 50
    """Denoising steps of the diffusion head, at most the 50 of its training."""
    stochastic_steps: Stochastic = Stochastic.one
    """diffusion: RL learns from one step of each chunk, drawn evenly, or from all; each costs a forward pass."""
    diffusion_eta: Share = 1.0
    """diffusion: noise of a stochastic step, from 0 (diffusion_min_std alone) to 1 (that of the forward process)."""
    diffusion_min_std: Positive = 0.1
    """diffusion: least standard deviation of a stochastic step."""
    use_film: bool = False
    """The vision towers are modulated by the instruction (FiLM, OFT+; eval)."""

    @property
    def every_step(self) -> bool:
        """All denoising steps are stochastic."""
        return self.stochastic_steps is Stochastic.all


def as_oft(cfg: OpenVlaSettings) -> OftSettings:
    """OpenVLA is OpenVLA-OFT without the keys of whole chunks."""
    if isinstance(cfg, OftSettings):
        return cfg
    return OftSettings.model_construct(**{name: getattr(cfg, name) for name in OpenVlaSettings.model_fields})


def record_of(cfg: OftSettings) -> ChunkRecord:
    """What is kept of a chunk: of the diffusion head the states around its stochastic steps, of a correction itself."""
    chunk = cfg.num_action_chunks, cfg.action_dim
    shape = ChunkShape(horizon=chunk[0], width=chunk[1], executed=chunk[0], action_dim=chunk[1])
    if cfg.corrects:
        return ChunkRecord(shape=shape, layout=correction_of(cfg, 0).layout, per_action=1)
    return ChunkRecord.chain(shape, cfg.num_diffusion_steps_inference - 1 if cfg.every_step else 1)


def correction_of(cfg: OftSettings, hidden: int) -> SteeringShape:
    """What the actor beside the frozen model reads, with a mean hidden row of `hidden` numbers, and chooses."""
    return SteeringShape.correcting(cfg, hidden, cfg.action_dim)
