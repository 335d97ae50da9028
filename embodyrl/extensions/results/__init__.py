"""The table of results: recipes, result cards, reruns, drift, imported results, and a sequential test."""
