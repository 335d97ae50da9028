"""Selection of MuJoCo's rendering library on this machine: EGL on a GPU, or OSMesa on the CPU."""
