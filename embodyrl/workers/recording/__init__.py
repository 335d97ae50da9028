"""Recording of episodes as videos."""
