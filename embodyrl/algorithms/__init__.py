"""Advantage estimators and policy losses, one file and one registry entry each; no module imports torch."""
