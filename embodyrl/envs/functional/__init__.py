"""JAX environments that are pure functions of a state (gymnax, Brax, MuJoCo Playground), batched over environments."""
