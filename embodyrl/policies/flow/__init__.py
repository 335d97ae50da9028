"""Flow-matching policies: pi0, pi0.5 and SmolVLA. Importing this package does not import torch."""
