"""Episodes of runs as data sets, and the command `data`."""
