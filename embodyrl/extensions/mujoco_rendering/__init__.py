"""Selection of MuJoCo's OpenGL backend: EGL on a GPU, or OSMesa on the CPU."""
