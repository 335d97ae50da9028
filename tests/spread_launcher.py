"""A launcher for several hosts that supports planning only and needs no package."""

from collections.abc import Mapping

from mixed_launcher import MixedLauncher

from embodyrl.cluster.protocol import ClusterSettings
from embodyrl.cluster.ray_cluster.placement import parse_placement


class SpreadLauncher(MixedLauncher):
    spans_hosts = True

    @classmethod
    def nodes(cls, cluster: ClusterSettings | None, *, disaggregated: bool = True) -> Mapping[str, tuple[int, ...]]:
        cluster = cluster or ClusterSettings()
        return parse_placement(cluster.component_placement, cluster.num_nodes, disaggregated=disaggregated)
