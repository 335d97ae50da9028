"""Launchers: start workers and detect their deaths."""

from embodyrl.cluster.protocol import LAUNCHERS

LAUNCHERS.add("inline", "embodyrl.cluster.inline:InlineLauncher")
LAUNCHERS.add("local", "embodyrl.cluster.local:LocalLauncher")

__all__ = ["LAUNCHERS"]
