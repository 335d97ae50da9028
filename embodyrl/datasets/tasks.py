"""Former place of the generated text tasks, which stored runs name."""

from embodyrl.extensions.text.tasks import *  # noqa: F403
