"""Former module of the Gymnasium wrapper; removed in the next release."""

from embodyrl.extensions.own_loop.environment import *  # noqa: F403
