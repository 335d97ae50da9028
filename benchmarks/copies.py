"""Count a pattern in the memory of processes, for `channel.py`: `python copies.py INVERTED_HEX PID...`."""

import sys
from pathlib import Path


def find(pattern: bytes, pids: list[int]) -> int:
    """Count the occurrences of the pattern in the memory of the processes; shared memory counts once."""
    seen: set[tuple[str, str, str]] = set()
    hits = 0
    for pid in pids:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                span, mode, offset, device, inode, *name = line.split(maxsplit=5)
                key = (device, inode, offset)
                if "r" not in mode or name[:1] == ["[vvar]"] or (mode[3] == "s" and key in seen):
                    continue
                if mode[3] == "s":
                    seen.add(key)
                start, end = (int(edge, 16) for edge in span.split("-"))
                memory.seek(start)
                try:
                    hits += memory.read(end - start).count(pattern)
                except OSError:
                    continue  # device memory, guard pages
    return hits


if __name__ == "__main__":
    # Inverted, so that the pattern itself is not in the memory of the searching process.
    print(find(bytes(255 - b for b in bytes.fromhex(sys.argv[1])), [int(pid) for pid in sys.argv[2:]]))
