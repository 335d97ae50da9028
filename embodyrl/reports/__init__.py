"""Reports on runs: HTML pages, result cards and paired tests."""
