"""Parts that the core does not need: each folder is one extension, and nothing outside imports it."""
