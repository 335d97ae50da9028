"""Rewards of text replies: a registry of reward functions, and processes that run them with a time limit."""
