"""Values that a key may take, where there is a fixed choice."""

from __future__ import annotations

from enum import StrEnum

RewardLevel = StrEnum("RewardLevel", ["chunk_level", "action_level"])
TokenLevel = StrEnum("TokenLevel", ["token_level", "action_level", "chunk_level"])
Precision = StrEnum("Precision", ["bf16", "fp32"])
OnExisting = StrEnum("OnExisting", ["error", "resume", "rename"])
RolloutMode = StrEnum("RolloutMode", ["collocated", "disaggregated"])
OnEnvCrash = StrEnum("OnEnvCrash", ["restart", "fail"])
OnNonfinite = StrEnum("OnNonfinite", ["stop", "skip"])
OnSaveError = StrEnum("OnSaveError", ["continue", "stop"])
OnVideoError = StrEnum("OnVideoError", ["warn", "stop"])
EpisodeFilter = StrEnum("EpisodeFilter", ["success", "all"])
FrameFormat = StrEnum("FrameFormat", ["png", "mp4"])
RenderProfile = StrEnum("RenderProfile", ["full", "lean"])
RewardNorm = StrEnum("RewardNorm", ["none", "group", "batch"])
TruncatedEpisodes = StrEnum("TruncatedEpisodes", ["train", "mask", "zero_reward"])
OldLogprob = StrEnum("OldLogprob", ["rollout", "recompute"])
WeightMode = StrEnum("WeightMode", ["mask", "truncate"])
WeightLevel = StrEnum("WeightLevel", ["token", "sequence", "geometric"])
ObsMode = StrEnum("ObsMode", ["rgb", "state"])
SimBackend = StrEnum("SimBackend", ["cpu", "gpu"])
