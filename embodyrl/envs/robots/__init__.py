"""Presets for robot environments from PyPI packages."""
