"""Text tasks: the prompt is the observation, and a reply is an action chunk of tokens, scored by a reward function."""
