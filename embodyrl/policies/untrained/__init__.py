"""Policies without weights: random actions, and the scripted expert of the environment."""
