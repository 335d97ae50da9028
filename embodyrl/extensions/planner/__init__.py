"""Predicts memory and time of a run before it starts."""
