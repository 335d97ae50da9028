"""The command `new`, which generates packages and experiment files from templates."""
