"""Web pages on localhost."""
