"""The public interface, one item per line: commands with flags, options of config groups, parts, and keys.

`interface.txt` records it, so that each change shows as a difference, which CHANGELOG.md names. To record the lines of
today: `python tests/cli/test_interface.py`.
"""

import difflib
from collections import defaultdict
from pathlib import Path

from embodyrl import parts
from embodyrl.algorithms.protocol import ADVANTAGES, LOSSES
from embodyrl.cli.commands import COMMANDS
from embodyrl.config import compose
from embodyrl.config.settings import Key, format_value, get_keys, to_builtin
from embodyrl.data.conversion.settings import ConvertSettings
from embodyrl.envs import ENVS
from embodyrl.plan.keys import all_keys
from embodyrl.policies import POLICIES

RECORDED = Path(__file__).with_name("interface.txt")
TABLES = ("ENVIRONMENTS", "POLICIES", "ADVANTAGES", "LOSSES", "REWARDS", "MONITORS", "LAUNCHERS")
REGISTRIES = {
    "ENVIRONMENTS": (ENVS, "env."),
    "POLICIES": (POLICIES, "model."),
    "ADVANTAGES": (ADVANTAGES, "algorithm."),
    "LOSSES": (LOSSES, "algorithm."),
}
"""The tables whose parts have keys, each with its registry and the prefix of the keys."""

OF_COMMANDS = {"convert": get_keys(ConvertSettings)}
"""Keys that commands read without a config."""


def key_line(name: str, key: Key) -> str:
    """Return a key with its type and default."""
    return f"key {name}: {key.type_text} = {'(required)' if key.required else format_value(to_builtin(key.default))}"


def interface() -> list[str]:
    """Return the interface lines. A key of parts has a line per type and default, with the parts that have it."""
    lines = []
    for name, command in COMMANDS.items():
        lines.append(f"command {name}: {' '.join(command.usage.split())}")
        for flag, options in command.flags.items():
            shown = {"default": None, **options}
            told = [f"{at}={value}" for at, value in sorted(shown.items()) if at not in ("help", "type")]
            lines.append(f"flag {name} {flag}: {' '.join(told)}")
    for group, default in compose.default_options("train").items():
        lines += [f"option {group}={name}{' (default)' * (name == default)}" for name in compose.options(group)]
    lines += [f"part {table.lower()} {name}" for table in TABLES for name in getattr(parts, table)]
    lines += [f"extra {name}" for name in sorted({*parts.EXTRAS.values()})]

    of_parts = set()
    for table, (registry, prefix) in REGISTRIES.items():
        readers = defaultdict(list)
        for part in getattr(parts, table):
            for name, key in get_keys(registry.get(part).settings, prefix).items():
                readers[key_line(name, key)].append(part)
                of_parts.add(name)
        for line, names in readers.items():
            every = len(names) == len(getattr(parts, table))
            lines.append(f"{line}  [{table.lower()}: {'each' if every else ', '.join(sorted(names))}]")
    for command, keys in OF_COMMANDS.items():
        lines += [f"{key_line(name, key)}  [command: {command}]" for name, key in keys.items()]
    return sorted(lines + [key_line(name, key) for name, key in all_keys().items() if name not in of_parts])


def test_command_line_interface_matches_the_recorded_lines():
    recorded = RECORDED.read_text(encoding="utf-8").splitlines()
    difference = [*difflib.unified_diff(recorded, interface(), "recorded", "today", lineterm="", n=0)]
    advice = "name each difference in CHANGELOG.md, then run: python tests/cli/test_interface.py"
    assert not difference, "\n".join([advice, *difference])


if __name__ == "__main__":
    RECORDED.write_text("\n".join(interface()) + "\n", encoding="utf-8")
