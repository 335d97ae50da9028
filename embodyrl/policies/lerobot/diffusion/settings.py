"""Config keys for the diffusion policy."""

from enum import StrEnum
from typing import Literal

from embodyrl.config.settings import Count, Positive, Share
from embodyrl.policies.lerobot.diffusion.config import DiffusionConfig
from embodyrl.policies.lerobot.settings import LeRobotSettings, get_chunk_shape
from embodyrl.policies.vla.records import ChunkRecord, Stochastic

Likelihood = StrEnum("Likelihood", ["chain", "dsrl", "residual"])
GreedyStart = StrEnum("GreedyStart", ["random", "zero"])


class DiffusionSettings(LeRobotSettings):
    """Config keys for the diffusion policy in LeRobot's layout."""

    keys_by_condition = {
        "likelihood=chain": "stochastic_steps diffusion_eta diffusion_min_std",
        "likelihood=dsrl": "noise_repeated",
        "likelihood!=dsrl": "greedy_start",
    }

    likelihood: Likelihood = Likelihood.chain
    """Source of log-probabilities for RL. chain: the denoising steps (DPPO). dsrl, residual: the model is frozen, and
    algorithm=sac trains an actor that chooses the initial noise (dsrl) or corrects the chunk (residual)."""
    sampler: Literal["DDPM", "DDIM"] | None = None
    """Sampler of the denoising steps: DDPM or DDIM; default: noise_scheduler_type of the checkpoint."""
    num_inference_steps: Count | None = None
    """Number of denoising steps per chunk; default: the checkpoint's value."""
    greedy_start: GreedyStart = GreedyStart.random
    """Initial noise and sampler noise of greedy actions. random: noise seeded by the observation; zero: no noise."""
    noise_repeated: bool = False
    """With likelihood=dsrl: use one noise vector for all actions of a chunk; false: one vector per action."""
    stochastic_steps: Stochastic = Stochastic.one
    """With likelihood=chain: train on one random denoising step per chunk, or on all steps; each step needs a forward
    pass."""
    diffusion_eta: Share = 1.0
    """With likelihood=chain and DDIM: noise scale of a stochastic step, from 0 (only diffusion_min_std) to 1 (noise of
    DDPM)."""
    diffusion_min_std: Positive = 0.1
    """With likelihood=chain: minimum standard deviation of a stochastic step."""

    @property
    def every_step(self) -> bool:
        """True if all denoising steps are stochastic."""
        return self.stochastic_steps is Stochastic.all

    def apply_sampler(self, config: DiffusionConfig) -> DiffusionConfig:
        """Return the config with the sampler and the number of steps from the settings."""
        changes = {"noise_scheduler_type": self.sampler, "num_inference_steps": self.num_inference_steps}
        return config.model_copy(update={key: value for key, value in changes.items() if value is not None})


def get_chunk_record(cfg: DiffusionSettings, config: DiffusionConfig) -> ChunkRecord:
    """Return the token layout of a chunk sampled by the denoising chain."""
    return ChunkRecord.chain(get_chunk_shape(config), config.steps - 1 if cfg.every_step else 1)
