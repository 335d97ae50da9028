"""Text tasks: the prompt is the observation, a reply is one chunk of tokens, the reward function the simulator."""
