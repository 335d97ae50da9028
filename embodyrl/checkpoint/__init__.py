"""Checkpoints: complete or absent, verified before use, and never code."""
