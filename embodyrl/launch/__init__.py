"""Launchers: where workers run and how their deaths are noticed."""

from embodyrl.launch.protocol import LAUNCHERS

LAUNCHERS.add("inline", "embodyrl.launch.inline:InlineLauncher")
LAUNCHERS.add("local", "embodyrl.launch.local:LocalLauncher")
LAUNCHERS.add("ray", "embodyrl.launch.ray_actors:RayLauncher")

__all__ = ["LAUNCHERS"]
