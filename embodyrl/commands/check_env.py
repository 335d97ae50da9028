"""Former module of `check_env`, imported by tests of earlier versions of `embodyrl new`."""

from embodyrl.extensions.check_env import check_env

__all__ = ["check_env"]
