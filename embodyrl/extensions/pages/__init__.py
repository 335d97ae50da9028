"""Web pages on this machine."""
