"""Checkpoints: complete or absent, verified before use, and never code."""

from embodyrl.checkpoint.store import CheckpointStore, Manifest

__all__ = ["CheckpointStore", "Manifest"]
