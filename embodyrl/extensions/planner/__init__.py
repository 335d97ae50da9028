"""Estimates of the memory and the speed of a run, computed before the run starts."""
