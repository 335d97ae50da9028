"""Assignment of the components of a run to hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from embodyrl.cluster.protocol import COMPONENTS
from embodyrl.errors import ConfigError


def parse_placement(
    placement: Mapping[str, str | int],
    num_nodes: int,
    *,
    disaggregated: bool = True,
    hosts: Mapping[str, int] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Parse {"env": "1-3", "rollout,actor": "0"} into node numbers of each component; node 0 is the driver's host.

    If a component has two entries, the last entry applies. Unless `disaggregated`, rollout and actor need equal nodes.

    Args:
        placement: nodes of each component, as numbers or as names or addresses of hosts.
        num_nodes: number of nodes of the run.
        disaggregated: rollout and actor may have different nodes.
        hosts: number of each host; None: before the cluster is connected, names get the highest numbers.

    Raises:
        ConfigError: an unknown or missing component, or a node that does not exist.
    """
    if hosts is None:
        host_names = dict.fromkeys(
            part for text in placement.values() for part in _split_nodes(text) if _HOST.fullmatch(part)
        )
        hosts = {name: max(0, num_nodes - 1 - index) for index, name in enumerate(host_names)}
    result: dict[str, tuple[int, ...]] = {}
    for names, text in placement.items():
        nodes = _parse_nodes(names, text, num_nodes, hosts)
        for name in (part.strip() for part in names.split(",")):
            if name not in COMPONENTS:
                raise ConfigError(
                    f"cluster.component_placement: '{name}' is not a component. Choose from "
                    f"{', '.join(COMPONENTS)}, "
                    "for example {env: 1-3, rollout: 0, actor: 0}."
                )
            result[name] = nodes
    if missing := [name for name in COMPONENTS if name not in result]:
        raise ConfigError(f"cluster.component_placement has no entry for {', '.join(missing)}; add one.")
    if result["rollout"] != result["actor"] and not disaggregated:
        raise ConfigError(
            "cluster.component_placement: with rollout.mode=collocated, rollout and actor share a process. "
            "Use the same nodes for both, or set rollout.mode=disaggregated."
        )
    return result


_HOST = re.compile(r"(?!all$)(?:[A-Za-z][\w.-]*|\d+(?:\.\d+){3}|[\da-fA-F]*:[\da-fA-F:.]+)")
"""Pattern of a host name or address."""


def _split_nodes(text: str | int) -> list[str]:
    return [part.strip() for part in str(text).split(",")]


def _parse_nodes(names: str, text: str | int, num_nodes: int, hosts: Mapping[str, int]) -> tuple[int, ...]:
    text = str(text).strip()
    if text == "all":
        return tuple(range(num_nodes))
    nodes: list[int] = []
    for part in _split_nodes(text):
        match = re.fullmatch(r"(\d+)\s*(?:-\s*(\d+))?", part)
        if match is not None:
            first, last = int(match[1]), int(match[2] or match[1])
            if not first <= last < num_nodes:
                raise ConfigError(
                    f"cluster.component_placement.{names}='{text}': node numbers must be 0 to {num_nodes - 1} in "
                    f"ascending order (cluster.num_nodes={num_nodes})."
                )
            nodes += range(first, last + 1)
        elif part in hosts:
            nodes.append(hosts[part])
        elif _HOST.fullmatch(part):
            raise ConfigError(
                f"cluster.component_placement.{names}='{text}': no node of the run is named '{part}'; the nodes are "
                f"{', '.join(hosts)}."
            )
        else:
            raise ConfigError(
                f"cluster.component_placement.{names}='{text}': use `all`, node numbers such as 0-3,5, or host names."
            )
    # Each node once, in the given order.
    return tuple(dict.fromkeys(nodes))
