"""Presets of robot environments from the package index."""
