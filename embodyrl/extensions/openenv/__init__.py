"""Environments of OpenEnv servers as conversations."""
