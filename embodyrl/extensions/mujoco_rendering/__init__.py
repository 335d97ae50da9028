"""Rendering of MuJoCo on this machine: EGL on a GPU, OSMesa on the CPU."""
