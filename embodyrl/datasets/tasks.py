"""Former module of the generated text tasks; stored runs refer to it."""

from embodyrl.extensions.text.tasks import *  # noqa: F403
