"""The command `doctor`, which checks the installation and this machine."""
