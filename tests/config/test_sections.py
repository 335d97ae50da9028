"""Sections that installed packages add to the config."""

import subprocess
import sys
from pathlib import Path

MODULE = """
from embodyrl.config.sections import of_commands
from embodyrl.config.settings import Count, Settings


class NotesSettings(Settings):
    lines: Count = 3
    '''Lines of a note.'''


SECTION = of_commands(NotesSettings, "train")
"""
PROGRAM = """
import logging
from embodyrl.config.settings import keys_of
from embodyrl.errors import ConfigError
from embodyrl.plan.config import load_config
from embodyrl.plan.keys import all_keys

logging.basicConfig(format="%(message)s")
words = ["model=mlp", "env=gym", "env.id=CartPole-v1"]
print(load_config("train", [*words, "notes.lines=5"]).notes.lines, "notes.lines" in all_keys())
for word in ("notes.lines=0", "notes.linse=5"):
    try:
        load_config("train", [*words, word])
    except ConfigError as error:
        print(error)
load_config("eval", [*words, "notes.lines=5"])
"""


def test_installed_package_adds_a_config_section(tmp_path: Path) -> None:
    (tmp_path / "notes_of_mine.py").write_text(MODULE)
    info = tmp_path / "notes_of_mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: notes-of-mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[embodyrl.sections]\nnotes = notes_of_mine:SECTION\n")
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == "5 True"
    assert "notes.lines" in run.stdout
    assert "must be an integer at least 1" in run.stdout
    assert "unknown key 'notes.linse'. Did you mean 'notes.lines'?" in run.stdout
    assert "notes.lines has no effect: `embodyrl eval` does not read notes.lines" in run.stderr
