"""The LIBERO benchmark (five suites, MuJoCo); importing this package loads no simulator."""

from embodyrl.envs.libero.factory import LiberoFactory

FACTORY = LiberoFactory()

__all__ = ["FACTORY"]
