"""Estimates of memory and time of a run."""
