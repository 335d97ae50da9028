"""Text environments for language models on OpenEnv servers."""
