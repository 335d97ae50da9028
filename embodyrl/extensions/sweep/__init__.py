"""Sweeps with the flag `-m` (multirun): one run for each combination of values."""
