"""Presets for robot environments in packages on PyPI."""
