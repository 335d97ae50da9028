"""Chat with language models: an OpenAI-compatible server, and a web page that compares two checkpoints."""
