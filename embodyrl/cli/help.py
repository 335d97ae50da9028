"""The part of the help that comes from the schema and from conf/: groups with their options, the commonest keys."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from embodyrl.config import tree
from embodyrl.config.keys import all_keys, spell


def groups_and_keys(common: Sequence[str]) -> str:
    """Return the sections "groups" and "common keys" of the help of a run command."""
    lines = ["groups (group=option; * = default):"]
    for group, default in tree.default_options("train").items():
        lines.append(f"  {group}")
        found = tree.options(group)
        width = max(map(len, found))
        for option, file in found.items():
            mark = "*" if option == default else " "
            text = textwrap.shorten(tree.one_line(file), 100 - width, placeholder="...")
            lines.append(f"   {mark} {option:<{width}}  {text}")
    lines += ["", "common keys (key=value):"]
    for name in common:
        key = all_keys()[name]
        lines.append(f"  {name}: {key.type_text} = {spell(key.default)}")
        lines.append(f"      {key.doc}")
    lines += ["", "all keys: embodyrl show train"]
    return "\n".join(lines)
