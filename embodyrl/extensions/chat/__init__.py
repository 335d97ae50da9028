"""Language models over HTTP: OpenAI's chat completions, and a chat page with two checkpoints."""
