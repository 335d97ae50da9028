"""Implicit Q-learning: offline RL on data sets. Importing this package does not import torch."""
