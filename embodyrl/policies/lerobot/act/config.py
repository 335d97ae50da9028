"""Keys of the config.json of an ACT policy (LeRobot 0.4.4). Does not import torch."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from embodyrl.policies.lerobot.config import LeRobotConfig, Normalization
from embodyrl.policies.lerobot.resnet_sizes import BASIC_BLOCK_RESNETS

KIND = "act"


class ActConfig(LeRobotConfig):
    """Config of an action chunking transformer (arXiv 2304.13705): sizes and loss weights."""

    chunk_size: PositiveInt = 100
    n_action_steps: PositiveInt = 100
    normalization_mapping: dict[str, Normalization] = Field(
        default_factory=lambda: dict.fromkeys(("VISUAL", "STATE", "ACTION"), Normalization.MEAN_STD)
    )
    replace_final_stride_with_dilation: bool = False
    pre_norm: bool = False
    dim_model: PositiveInt = 512
    n_heads: PositiveInt = 8
    dim_feedforward: PositiveInt = 3200
    feedforward_activation: Literal["relu", "gelu", "glu"] = "relu"
    n_encoder_layers: PositiveInt = 4
    n_decoder_layers: PositiveInt = 1
    use_vae: bool = True
    latent_dim: PositiveInt = 32
    n_vae_encoder_layers: PositiveInt = 4
    temporal_ensemble_coeff: float | None = None
    dropout: float = Field(default=0.1, ge=0, lt=1)
    kl_weight: NonNegativeFloat = 10.0

    @property
    def horizon_length(self) -> int:
        """H: number of actions per chunk."""
        return self.chunk_size

    def find_problem(self) -> str | None:
        """Return a description of the first config error, or None."""
        if self.n_obs_steps != 1:
            return f"n_obs_steps={self.n_obs_steps}, but ACT uses one observation step"
        if self.temporal_ensemble_coeff is not None and self.n_action_steps > 1:
            return f"temporal_ensemble_coeff with n_action_steps={self.n_action_steps}; it must be 1"
        if self.dim_model % self.n_heads or (self.cameras and self.dim_model % 4):
            return f"dim_model={self.dim_model} is not a multiple of n_heads={self.n_heads} (with images, also of 4)"
        if self.replace_final_stride_with_dilation and self.vision_backbone in BASIC_BLOCK_RESNETS:
            return f"replace_final_stride_with_dilation with {self.vision_backbone}, which does not support dilation"
        if self.feedforward_activation == "glu":
            return "feedforward_activation=glu is not supported"
        return super().find_problem()
