"""Reports on runs: HTML pages, result cards, a terminal dashboard and loggers."""
