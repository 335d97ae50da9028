"""Text tasks: data sets of prompts, reward functions, and the sandbox that runs generated code."""
