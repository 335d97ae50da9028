"""Keys of the config.json of a Diffusion Policy (LeRobot 0.4.4). Does not import torch."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from embodyrl.policies.lerobot.config import STATE, LeRobotConfig, Normalization

KIND = "diffusion"
FINAL_GROUPS = 8
"""Number of groups in the last group norm, for which the original implementation ignores `n_groups`."""


class DiffusionConfig(LeRobotConfig):
    """Config of a diffusion policy (arXiv 2303.04137): sizes, noise schedule and loss."""

    n_obs_steps: PositiveInt = 2
    horizon: PositiveInt = 16
    n_action_steps: PositiveInt = 8
    normalization_mapping: dict[str, Normalization] = Field(
        default_factory=lambda: {
            "VISUAL": Normalization.MEAN_STD,
            "STATE": Normalization.MIN_MAX,
            "ACTION": Normalization.MIN_MAX,
        }
    )
    resize_shape: tuple[PositiveInt, PositiveInt] | None = None
    crop_ratio: float = Field(default=1.0, gt=0, le=1)
    crop_shape: tuple[PositiveInt, PositiveInt] | None = None
    crop_is_random: bool = True
    use_group_norm: bool = True
    spatial_softmax_num_keypoints: PositiveInt = 32
    use_separate_rgb_encoder_per_camera: bool = False
    down_dims: tuple[PositiveInt, ...] = Field(default=(512, 1024, 2048), min_length=1)
    kernel_size: PositiveInt = 5
    n_groups: PositiveInt = 8
    diffusion_step_embed_dim: int = Field(default=128, ge=4)
    use_film_scale_modulation: bool = True
    noise_scheduler_type: Literal["DDPM", "DDIM"] = "DDPM"
    num_train_timesteps: PositiveInt = 100
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"] = "squaredcos_cap_v2"
    beta_start: PositiveFloat = 0.0001
    beta_end: PositiveFloat = 0.02
    prediction_type: Literal["epsilon", "sample"] = "epsilon"
    clip_sample: bool = True
    clip_sample_range: PositiveFloat = 1.0
    num_inference_steps: PositiveInt | None = None
    do_mask_loss_for_padding: bool = False

    @property
    def horizon_length(self) -> int:
        """H: number of actions per chunk."""
        return self.horizon

    @property
    def steps(self) -> int:
        """Number of denoising steps per chunk."""
        return self.num_inference_steps or self.num_train_timesteps

    @property
    def crop_size(self) -> tuple[int, int] | None:
        """Height and width to which images are cropped; with `resize_shape`, `crop_ratio` determines the size."""
        if self.resize_shape is None:
            return self.crop_shape
        if self.crop_ratio == 1.0:
            return None
        height, width = self.resize_shape
        return int(height * self.crop_ratio), int(width * self.crop_ratio)

    @property
    def input_size(self) -> tuple[int, int]:
        """Height and width of the backbone's input."""
        return self.crop_size or self.resize_shape or self.image_size

    @property
    def condition_width(self) -> int:
        """Width of the U-Net's condition: state, image features and environment state of each observed step."""
        image_features = 2 * self.spatial_softmax_num_keypoints * len(self.cameras)
        return self.n_obs_steps * (self.state_dim + image_features + self.environment_dim)

    def find_problem(self) -> str | None:
        """Return a description of the first config error, or None."""
        if STATE not in self.input_features:
            return f"input_features has no '{STATE}'"
        if (
            self.cameras
            and self.crop_size
            and any(a > b for a, b in zip(self.crop_size, self._before_crop, strict=True))
        ):
            return f"crop_shape={list(self.crop_size)} is larger than the images"
        if self.horizon % 2 ** len(self.down_dims):
            return f"horizon={self.horizon} is not a multiple of 2 to the power of the {len(self.down_dims)} down_dims"
        if self.kernel_size % 2 == 0 or self.diffusion_step_embed_dim % 2:
            return (
                f"kernel_size={self.kernel_size} is even, or diffusion_step_embed_dim={self.diffusion_step_embed_dim} "
                "is odd"
            )
        if any(width % self.n_groups for width in self.down_dims) or self.down_dims[0] % FINAL_GROUPS:
            return (
                f"down_dims={list(self.down_dims)} are not multiples of n_groups={self.n_groups}, or the first is not "
                f"a multiple of {FINAL_GROUPS}"
            )
        if self.steps > self.num_train_timesteps:
            return f"num_inference_steps={self.steps} exceeds num_train_timesteps={self.num_train_timesteps}"
        return super().find_problem()

    @property
    def _before_crop(self) -> tuple[int, int]:
        return self.resize_shape or self.image_size
