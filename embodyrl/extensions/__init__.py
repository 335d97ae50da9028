"""Features, one per folder."""
