"""The commands `list` (components, runs), `show` (config keys), `completion` (shell) and `bench` (benchmarks)."""
