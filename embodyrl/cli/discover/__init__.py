"""The commands `list` (components, runs), `show` (config keys) and `completion` (shell)."""
