"""Values that a key may take, where there is a fixed choice."""

from __future__ import annotations

from enum import Enum


class RewardLevel(str, Enum):
    chunk_level = "chunk_level"
    action_level = "action_level"


class TokenLevel(str, Enum):
    token_level = "token_level"
    action_level = "action_level"
    chunk_level = "chunk_level"


class Precision(str, Enum):
    bf16 = "bf16"
    fp32 = "fp32"


class OnExisting(str, Enum):
    error = "error"
    resume = "resume"
    rename = "rename"


class RolloutMode(str, Enum):
    collocated = "collocated"
    disaggregated = "disaggregated"


class OnEnvCrash(str, Enum):
    restart = "restart"
    fail = "fail"


class OnNonfinite(str, Enum):
    stop = "stop"
    skip = "skip"


class OnVideoError(str, Enum):
    warn = "warn"
    stop = "stop"


class EpisodeFilter(str, Enum):
    success = "success"
    all = "all"


class FrameFormat(str, Enum):
    png = "png"
    mp4 = "mp4"


class RenderProfile(str, Enum):
    full = "full"
    lean = "lean"
