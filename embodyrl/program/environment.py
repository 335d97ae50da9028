"""Former place of environments in the form of Gymnasium; goes with the next release."""

from embodyrl.extensions.own_loop.environment import *  # noqa: F403
