"""Deprecated module of the generated text tasks, kept because configs of old runs contain its path."""

from embodyrl.extensions.text.tasks import *  # noqa: F403
