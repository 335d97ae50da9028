"""Gymnasium vector environments: one vector environment contains all slots."""
