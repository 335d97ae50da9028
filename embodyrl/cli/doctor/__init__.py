"""The command `doctor`, which checks the installation, this machine and its GPUs."""
