"""Adapter for any Gymnasium environment; importing this package does not import gymnasium."""
