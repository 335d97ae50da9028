"""Meshes with fewer triangles, which a CPU renders faster."""
