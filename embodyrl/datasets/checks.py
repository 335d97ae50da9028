"""Former place of the layout check of data sets."""

from embodyrl.extensions.demonstrations.checks import *  # noqa: F403
