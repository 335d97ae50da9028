"""Algorithms: advantage estimators and policy losses, each one file and one registry line. Needs no torch."""
