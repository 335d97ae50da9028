"""Choice of MuJoCo's rendering library on this machine: EGL on a GPU, OSMesa on the CPU."""
