"""Former module of policies in Python; removed in the next release."""

from embodyrl.extensions.own_loop.acting import *  # noqa: F403
