"""Text tasks: the prompt is the observation, a reply is an action chunk of tokens, and a reward function scores it."""
