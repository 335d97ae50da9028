"""The command `new`, which generates packages from templates."""
