"""Chunks that begin some env steps after their observation."""
