"""Lists of what exists, keys with their sources, shell completion, and the benchmarks of a checkout."""
