"""Web servers for pages on localhost."""
