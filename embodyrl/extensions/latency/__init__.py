"""Success against the delay of the policy."""
