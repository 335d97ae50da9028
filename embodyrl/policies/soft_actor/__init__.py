"""Squashed Gaussian actions and critics of soft actor-critic. Importing this package does not import torch."""
