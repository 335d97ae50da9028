"""Environments and trained policies as Python objects, for custom training loops."""
