"""Keys of OpenVLA and OpenVLA-OFT."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from embodyrl.config.settings import Count
from embodyrl.policies.settings import AdapterSettings

Normalization = StrEnum("Normalization", ["bounds_q99", "bounds"])
ImagePipeline = StrEnum("ImagePipeline", ["rlinf", "official"])
ActionHead = StrEnum("ActionHead", ["discrete", "l1", "diffusion"])


class OpenVlaSettings(AdapterSettings):
    """OpenVLA: one action per query, token by token."""

    action_dim: Count = 7
    """A: dimensions of one action."""
    unnorm_key: str | None = None
    """Key of the action statistics; default: the environment's own."""
    num_images_in_input: Annotated[int, Field(ge=1, le=64)] = 1
    """Camera images per query."""
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


class OftSettings(OpenVlaSettings):
    """OpenVLA-OFT: a whole chunk at once."""

    use_proprio: bool = False
    """Feed proprioception."""
    append_stop: bool = True
    """Put the STOP token after the action placeholders, as the original training did."""
    action_head: ActionHead = ActionHead.discrete
    """discrete tokens (RL, sft, eval), or the continuous heads l1 (sft, eval) and diffusion (eval)."""
    num_diffusion_steps_inference: Annotated[int, Field(ge=1, le=50)] = 50
    """Denoising steps of the diffusion head, at most the 50 of its training."""
    use_film: bool = False
    """The vision towers are modulated by the instruction (FiLM, OFT+; eval)."""


def as_oft(cfg: OpenVlaSettings) -> OftSettings:
    """OpenVLA is OpenVLA-OFT without the keys of whole chunks."""
    if isinstance(cfg, OftSettings):
        return cfg
    return OftSettings.model_construct(**{name: getattr(cfg, name) for name in OpenVlaSettings.model_fields})
