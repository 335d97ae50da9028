"""Launcher that runs workers on several hosts as Ray actors."""
