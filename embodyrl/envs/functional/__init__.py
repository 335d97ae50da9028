"""Environments in JAX as pure functions of a state (gymnax, Brax, MuJoCo Playground), batched over slots."""
