"""Policy server for robot policies."""
