"""Environments of OpenEnv servers as text environments for language models."""
