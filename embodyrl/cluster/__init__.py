"""Launchers: start workers and detect their deaths."""

from embodyrl.cluster.protocol import LAUNCHERS

__all__ = ["LAUNCHERS"]
