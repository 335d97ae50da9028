"""The LIBERO benchmark (five suites, MuJoCo); importing this package loads no simulator."""
