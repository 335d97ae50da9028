"""Environments and trained policies as objects, for training loops in other programs."""
