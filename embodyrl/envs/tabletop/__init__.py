"""A small built-in table with blocks and plates (numpy only): a place to learn and to test, never a benchmark."""
