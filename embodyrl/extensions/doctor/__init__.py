"""The command `doctor`: checks of this machine."""
