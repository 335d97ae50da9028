"""Rewards of text replies: registry of reward functions, and processes that run the functions with a time limit."""
