"""Flow policies: pi0, pi0.5, SmolVLA and a small policy. Importing this package does not import torch."""
