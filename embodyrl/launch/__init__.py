"""Launchers: where workers run and how their deaths are noticed."""

from embodyrl.launch.protocol import LAUNCHERS

LAUNCHERS.add("inline", "embodyrl.launch.inline:InlineLauncher")
LAUNCHERS.add("local", "embodyrl.launch.local:LocalLauncher")

__all__ = ["LAUNCHERS"]
