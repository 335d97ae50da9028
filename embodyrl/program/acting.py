"""Former place of policies as objects; goes with the next release."""

from embodyrl.extensions.own_loop.acting import *  # noqa: F403
