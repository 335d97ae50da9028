"""Former module of the generated text tasks, kept because configs of old runs refer to this path."""

from embodyrl.extensions.text.tasks import *  # noqa: F403
