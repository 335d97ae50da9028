"""Mesh simplification for faster rendering on a CPU (`env.render_profile=lean`)."""
