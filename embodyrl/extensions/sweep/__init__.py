"""The flag `-m` (multirun): one run for each combination of values."""
