"""The command `new`: packages to start from."""
