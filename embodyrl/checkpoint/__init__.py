"""Checkpoints: atomic writes, verification before use, no code execution."""
