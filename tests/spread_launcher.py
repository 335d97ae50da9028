"""A launcher for several hosts, as far as a plan looks at it, which needs no package."""

from mixed_launcher import MixedLauncher

from embodyrl.cluster.protocol import ClusterSettings


class SpreadLauncher(MixedLauncher):
    sections = {"cluster": ClusterSettings}
