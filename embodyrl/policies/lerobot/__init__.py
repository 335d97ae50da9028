"""Shared parts of LeRobot's imitation policies: checkpoint folders, normalization, image backbones, inference."""
