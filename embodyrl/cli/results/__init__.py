"""Table of results: training recipes, result cards, reruns, drift detection, and a sequential test."""
