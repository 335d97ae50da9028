"""RECAP: policies conditioned on the label "positive" or "negative" of an action's advantage.

Importing this package does not import torch.
"""
