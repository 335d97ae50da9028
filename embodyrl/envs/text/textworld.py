"""TextWorld's games (arXiv 1806.11532) with Gymnasium's interface: an action is one of the allowed commands."""

import importlib
from pathlib import Path
from typing import Any

from embodyrl.envs.text.environment import clip
from embodyrl.errors import ConfigError, MissingDependencyError

SUFFIXES = (".z8", ".ulx")
"""What `tw-make` writes."""
COMMANDS = "admissible_commands"
"""In an info: the texts of which the next action is one."""


def game_files(place: str) -> list[Path]:
    """The games of a file or folder, in the order of their names; none if it is no such place."""
    path = Path(place)
    found = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file for file in found if file.suffix in SUFFIXES and file.is_file()]


class TextWorldGame:
    """One game after the other: the seed of an episode chooses the file. Success is a game that is won."""

    action_space = None

    def __init__(self, files: list[Path], seen_bytes: int) -> None:
        """`seen_bytes`: an observation with its commands is no longer than this.

        Raises:
            MissingDependencyError: textworld is not installed.
            ConfigError: a file is no game.
        """
        try:
            self._textworld: Any = importlib.import_module("textworld")
        except ImportError as error:
            raise MissingDependencyError(
                f"env.id={files[0]} is a TextWorld game ({error}): pip install textworld."
            ) from error
        self._files, self._bytes = files, seen_bytes
        self._env: Any = None
        self._open: Path | None = None
        self._seen, self._score = "", 0.0
        self.reset(seed=0)

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin the seed's game; its goal stands before what is seen."""
        file = self._files[seed % len(self._files)]
        if file != self._open:
            self.close()
            infos = self._textworld.EnvInfos(
                admissible_commands=True, won=True, objective=True, description=True, feedback=True
            )
            try:
                self._env, self._open = self._textworld.start(str(file), infos), file
            except Exception as error:  # whatever the interpreter raises
                raise ConfigError(f"env.id: {file} is no game of TextWorld ({error}).") from error
        state = self._env.reset()
        self._score = 0.0
        return self._tell(state, f"{state['objective']}\n{state['description']}")

    def step(self, command: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out a command; the reward is what it adds to the score."""
        state, score, done = self._env.step(command)
        earned, self._score = float(score) - self._score, float(score)
        seen, info = self._tell(state, str(state["feedback"]).split("\n>")[0])
        return seen, earned, bool(done), False, info | {"is_success": bool(state["won"])}

    def _tell(self, state: Any, words: str) -> tuple[str, dict[str, Any]]:
        commands = [str(command) for command in state[COMMANDS] or ()]
        listed = "\nCommands: " + ", ".join(commands)
        said = "\n".join(line for line in words.splitlines() if line.strip())
        self._seen = clip(said, max(0, self._bytes - len(listed.encode()))) + listed
        return self._seen, {COMMANDS: commands}

    def render(self) -> str:
        """What was seen last, and the commands that are allowed."""
        return self._seen

    def close(self) -> None:
        """Close the game."""
        if self._env is not None:
            self._env.close()
