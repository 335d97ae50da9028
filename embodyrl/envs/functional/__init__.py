"""Functional batched environments in JAX."""
