"""Rewards of text answers: small functions in a registry, and the judge that runs them with a time limit."""
