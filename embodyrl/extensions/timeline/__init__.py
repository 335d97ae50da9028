"""Busy times of workers: metrics of a training step, and a trace."""
