"""The table of results: training recipes, result cards, reruns, detection of drift, and a sequential test."""
