"""Which hosts of a cluster a component may use. The text is parsed, never evaluated."""

import re
from collections.abc import Mapping

from embodyrl.errors import ConfigError

COMPONENTS = ("env", "rollout", "actor")


def parse_placement(
    placement: Mapping[str, str | int], num_nodes: int, *, apart: bool = True
) -> dict[str, tuple[int, ...]]:
    """Turn {"env": "1-3", "rollout,actor": "0"} into node numbers of each component; node 0 is the driver's.

    Of two entries for one component the later counts. Unless they are `apart`, rollout and actor need the same nodes.

    Raises:
        ConfigError: an unknown or missing component, or a node that does not exist.
    """
    found: dict[str, tuple[int, ...]] = {}
    for names, text in placement.items():
        nodes = _nodes(names, text, num_nodes)
        for name in (part.strip() for part in names.split(",")):
            if name not in COMPONENTS:
                raise ConfigError(
                    f"cluster.component_placement: '{name}' is no component; there are {', '.join(COMPONENTS)}, "
                    "for example {env: 1-3, rollout: 0, actor: 0}."
                )
            found[name] = nodes
    if missing := [name for name in COMPONENTS if name not in found]:
        raise ConfigError(f"cluster.component_placement does not say where {', '.join(missing)} run; add it.")
    if found["rollout"] != found["actor"] and not apart:
        raise ConfigError(
            "cluster.component_placement: with rollout.mode=collocated rollout and actor share a process and need the "
            "same nodes; write the same for both, or use rollout.mode=disaggregated."
        )
    return found


def _nodes(names: str, text: str | int, num_nodes: int) -> tuple[int, ...]:
    text = str(text).strip()
    if text == "all":
        return tuple(range(num_nodes))
    nodes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise ConfigError(
                f"cluster.component_placement.{names}='{text}': must be all, or node numbers such as 0-3,5."
            )
        nodes += range(int(match[1]), int(match[2] or match[1]) + 1)
    if not nodes or max(nodes) >= num_nodes:
        raise ConfigError(
            f"cluster.component_placement.{names}='{text}': nodes are numbered 0 to {num_nodes - 1} "
            f"(cluster.num_nodes={num_nodes})."
        )
    return tuple(dict.fromkeys(nodes))
