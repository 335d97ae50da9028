"""Simulated inference delay: the first action of a chunk is executed some env steps after the observation."""
