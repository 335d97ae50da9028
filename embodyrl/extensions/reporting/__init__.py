"""Reports on runs as HTML pages, for one run or for several runs."""
