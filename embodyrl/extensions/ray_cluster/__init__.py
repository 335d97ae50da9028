"""Workers on several hosts through Ray."""
