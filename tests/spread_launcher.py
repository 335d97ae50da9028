"""A launcher for several hosts that supports planning only and needs no package."""

from mixed_launcher import MixedLauncher

from embodyrl.cluster.protocol import ClusterSettings


class SpreadLauncher(MixedLauncher):
    sections = {"cluster": ClusterSettings}
