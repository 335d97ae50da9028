"""Advantage estimators and policy losses. Each is one file and one registry line; none imports torch."""
