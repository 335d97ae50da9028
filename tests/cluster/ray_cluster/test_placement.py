"""Placement strings are parsed without evaluation."""

from __future__ import annotations

import pytest

from embodyrl.cluster.protocol import place_rank
from embodyrl.cluster.ray_cluster.placement import parse_placement
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config


def test_placement_assigns_nodes_to_components():
    parsed = parse_placement({"env": "1-3, 5", "rollout,actor": "0"}, 6)
    assert parsed == {"env": (1, 2, 3, 5), "rollout": (0,), "actor": (0,)}
    assert parse_placement({"env,rollout,actor": "all"}, 2)["env"] == (0, 1)


def test_placement_accepts_host_names():
    hosts = {"head": 0, "10.0.0.1": 0, "sim-1": 1, "10.0.0.2": 1, "fe80::2": 2}
    named = {"env": "sim-1, fe80::2", "rollout": "10.0.0.2", "actor": "head"}
    assert parse_placement(named, 3, hosts=hosts) == {"env": (1, 2), "rollout": (1,), "actor": (0,)}
    planned = parse_placement(named, 4)
    assert len({*planned["env"], *planned["rollout"], *planned["actor"]}) == 4
    with pytest.raises(ConfigError, match=r"no node of the run is named 'gone'; the nodes are head, 10\.0\.0\.1"):
        parse_placement({"env,rollout,actor": "gone"}, 3, hosts=hosts)


def test_component_placement_replaces_the_default():
    pytest.importorskip("ray")
    words = ["launcher.name=ray", "cluster.num_nodes=2", "cluster.component_placement={env:1}"]
    placement = load_config("train", words).cluster.component_placement
    assert parse_placement(placement, 2) == {"env": (1,), "rollout": (0, 1), "actor": (0, 1)}


@pytest.mark.parametrize(
    ("world", "nodes", "placed"),
    [(16, 2, "0" * 8 + "1" * 8), (4, 4, "0123"), (6, 4, "001223"), (3, 1, "000"), (2, 4, "02")],
)
def test_neighboring_ranks_share_a_node(world, nodes, placed):
    """Ranks of a shard group are neighbours, and links within a node are the fastest."""
    names = [f"node {number}" for number in range(nodes)]
    assert [place_rank(rank, world, names) for rank in range(world)] == [f"node {node}" for node in placed]


@pytest.mark.parametrize(
    ("placement", "fragment"),
    [
        ({"env": "__import__('os')", "rollout,actor": "0"}, "node numbers such as"),
        ({"env": "0-9", "rollout,actor": "0"}, "node numbers must be 0 to 1"),
        ({"env": "0-99999999999999", "rollout,actor": "0"}, "node numbers must be 0 to 1"),
        ({"env": "0,1-0", "rollout,actor": "0"}, "in ascending order"),
        ({"env": "0"}, "has no entry for rollout, actor"),
        ({"envs": "0", "rollout,actor": "0"}, "'envs' is not a component"),
        ({"env,rollout": "0", "actor": "1"}, "share a process"),
    ],
)
def test_invalid_placement_error_names_the_value(placement, fragment):
    with pytest.raises(ConfigError, match=fragment):
        parse_placement(placement, 2, disaggregated=False)
