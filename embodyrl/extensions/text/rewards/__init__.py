"""Rewards of text replies: functions in a registry, and processes that run them with a time limit."""
