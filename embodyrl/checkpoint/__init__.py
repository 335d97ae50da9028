"""Checkpoints: atomic, verified before use, free of code."""
