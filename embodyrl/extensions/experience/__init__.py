"""Data sets of recorded episodes: recording during runs, and the command `data`."""
