"""Config keys for OpenVLA and OpenVLA-OFT."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from embodyrl.config.settings import Count, Positive, Share
from embodyrl.policies.settings import AdapterSettings
from embodyrl.policies.steering.settings import ResidualSettings
from embodyrl.policies.vla.records import ChunkRecord, ChunkShape, Stochastic

Normalization = StrEnum("Normalization", ["bounds_q99", "bounds"])
ImagePipeline = StrEnum("ImagePipeline", ["rlinf", "official"])
ActionHead = StrEnum("ActionHead", ["discrete", "l1", "diffusion"])
Likelihood = StrEnum("Likelihood", ["head", "residual"])


class OpenVlaSettings(AdapterSettings):
    """Config keys for OpenVLA, which predicts one action per inference, autoregressively."""

    keys_by_condition = {"never: OpenVLA decodes token by token": "cuda_graphs"}

    action_dim: Count = 7
    """A: dimension of an action."""
    unnorm_key: str | None = None
    """Key of the action statistics; default: the key of the environment."""
    num_images_in_input: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of camera images per inference."""
    cameras: list[str] | None = None
    """Environment cameras that correspond to the checkpoint's cameras, in the checkpoint's order; default: the
    checkpoint's names."""
    action_normalization: Normalization = Normalization.bounds_q99
    """Statistics that normalize actions and proprioception: bounds_q99 maps q01 and q99 to -1 and 1, bounds maps min
    and max."""
    image_pipeline: ImagePipeline = ImagePipeline.rlinf
    """Image preprocessing used to train the checkpoint: rlinf (bicubic) or official (JPEG, lanczos, 0.9 crop)."""
    rope_bf16_table: bool = False
    """Round the rotary frequencies to bfloat16 as in RLinf; only for checkpoints trained with this rounding."""
    freeze: list[str] = []
    """Patterns of parameter names to freeze, for example [vision_backbone.*]."""
    compile: bool = False
    """Compile the model with torch.compile (slow first steps)."""
    cuda_graphs: bool = False
    """Run inference with CUDA graphs, one for each batch size."""

    def problems(self) -> Iterator[str]:
        """Yield errors for settings that contradict each other."""
        yield from super().problems()
        if self.compile and self.cuda_graphs:
            yield "model.compile=true and model.cuda_graphs=true: use one of them; a compiled model cannot be captured."


class OftSettings(OpenVlaSettings, ResidualSettings):
    """Config keys for OpenVLA-OFT, which predicts a whole chunk in parallel."""

    keys_by_condition = {
        "likelihood!=residual": "freeze compile",
        "action_head=discrete": "cuda_graphs",
        "action_head=l1 and likelihood=head": "action_std",
        "action_head=diffusion": "num_diffusion_steps_inference",
        "action_head=diffusion and likelihood=head": "stochastic_steps diffusion_eta diffusion_min_std",
    }

    use_proprio: bool = False
    """Use proprioception as an input."""
    append_stop: bool = True
    """Append the STOP token to the action placeholders, as in the original training."""
    action_head: ActionHead = ActionHead.discrete
    """Action head: discrete tokens, or continuous actions (l1, diffusion)."""
    likelihood: Likelihood = Likelihood.head
    """Source of log-probabilities for RL. head: the action head; residual: an actor that corrects the greedy chunk of
    the frozen model."""
    action_std: Positive = 0.1
    """With action_head=l1: initial standard deviation of normalized actions that are sampled in RL; RL trains it."""
    num_diffusion_steps_inference: Annotated[int, Field(ge=1, le=50)] = 50
    """Number of denoising steps of the diffusion head, at most 50 (the number in training)."""
    stochastic_steps: Stochastic = Stochastic.one
    """With action_head=diffusion: train on one random step per chunk, or on all steps; each step needs a forward pass.
    """
    diffusion_eta: Share = 1.0
    """With action_head=diffusion: noise scale of a stochastic step, from 0 (only diffusion_min_std) to 1 (noise of
    DDPM)."""
    diffusion_min_std: Positive = 0.1
    """With action_head=diffusion: minimum standard deviation of a stochastic step."""

    @property
    def every_step(self) -> bool:
        """True if all denoising steps are stochastic."""
        return self.stochastic_steps is Stochastic.all


def to_oft_settings(cfg: OpenVlaSettings) -> OftSettings:
    """Return the settings of OpenVLA as settings of OpenVLA-OFT."""
    if isinstance(cfg, OftSettings):
        return cfg
    values: dict[str, Any] = {name: getattr(cfg, name) for name in OpenVlaSettings.model_fields}
    values["cuda_graphs"] = False
    return OftSettings.model_construct(**values)


def get_chunk_record(cfg: OftSettings) -> ChunkRecord:
    """Return the token layout of a chunk of the diffusion head: states before and after stochastic steps."""
    chunk = cfg.num_action_chunks, cfg.action_dim
    shape = ChunkShape(horizon=chunk[0], width=chunk[1], executed=chunk[0], action_dim=chunk[1])
    return ChunkRecord.chain(shape, cfg.num_diffusion_steps_inference - 1 if cfg.every_step else 1)
