"""RECAP: policies that are conditioned on their own advantage. Importing this package does not import torch."""
