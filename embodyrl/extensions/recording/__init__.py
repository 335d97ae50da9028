"""Videos of episodes."""
