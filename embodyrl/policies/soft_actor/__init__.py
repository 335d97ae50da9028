"""Squashed Gaussian actions and critics for soft actor-critic. Importing this package does not import torch."""
