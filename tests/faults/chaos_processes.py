"""Processes below a driver and their roles, for `chaos.py`."""

from __future__ import annotations

import re
from pathlib import Path


def process_tree(root: int) -> dict[int, list[int]]:
    """Return the children of each descendant of a process."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    below, found = [root], {}
    while below:
        pid = below.pop()
        found[pid] = children.get(pid, [])
        below += found[pid]
    return found


def role_of(pid: int) -> tuple[str, str] | None:
    """Return role and name of a process below a driver; None for processes that get no signals."""
    folder = Path(f"/proc/{pid}")
    try:
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        if (folder / "comm").read_text().startswith("embodyrl:"):
            name = (folder / "fd/1").readlink().stem
            return name.partition("_")[0], name
        if command.startswith("ray::RemoteWorker") and (name := (folder / "fd/1").readlink().stem).count("-") == 2:
            name = name.rpartition("-")[2]
            return name.partition("_")[0], name
    except OSError:
        return None
    if "spawn_main" in command:
        return "young", "worker"
    if "rewards.child" in command:
        return "reward", "reward"
    return ("program", "program") if " -I -c " in command else None


def has_handler(pid: int, signum: int, *, caught: bool = False) -> bool:
    """Return whether a process handles a signal, or, unless `caught`, ignores it."""
    text = Path(f"/proc/{pid}/status").read_text()
    kinds = "Cgt" if caught else "Ign|Cgt"
    masks = [int(m, 16) for m in re.findall(rf"^Sig(?:{kinds}):\s*(\w+)", text, re.MULTILINE)]
    return any(mask >> (signum - 1) & 1 for mask in masks)
