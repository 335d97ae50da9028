"""Former place of `check_env`, which tests made by earlier versions of `embodyrl new` import."""

from embodyrl.extensions.check_env import check_env

__all__ = ["check_env"]
