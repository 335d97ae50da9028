"""Table of results: training recipes, result cards, reruns, and drift detection."""
