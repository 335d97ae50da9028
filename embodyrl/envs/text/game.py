"""Gymnasium environments as conversations: observations are text, and a reply names the action."""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from embodyrl.config.settings import ChangesStateIds
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.text.dialogue import Dialogue, DialogueEnv, TurnResult, build_dialogue_spec, truncate_text
from embodyrl.envs.text.settings import DialogueSettings, Turns
from embodyrl.errors import ConfigError, EnvError, MissingDependencyError
from embodyrl.registry import load, name_problems, takes
from embodyrl.types import EnvSpec, EpisodeStart

GAME_SUFFIXES = (".z8", ".ulx")
"""File name suffixes of games written by `tw-make`."""
COMMANDS_KEY = "admissible_commands"
"""Key in `info` under which a game lists the commands that it accepts."""


def find_game_files(location: str) -> list[Path]:
    """Return the game files of a file or folder, sorted by name; empty without games."""
    path = Path(location)
    paths = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file for file in paths if file.suffix in GAME_SUFFIXES and file.is_file()]


class TextWorldGame:
    """Environment for TextWorld games; the seed of an episode selects the game file, and winning is a success."""

    action_space = None

    def __init__(self, files: list[Path], max_bytes: int) -> None:
        """Check the game files. An observation has at most `max_bytes` bytes, including the allowed commands.

        Raises:
            MissingDependencyError: textworld is not installed.
            ConfigError: a file is not a game.
        """
        try:
            self._textworld: Any = importlib.import_module("textworld")
        except ImportError as error:
            raise MissingDependencyError(
                f"env.id={files[0]} is a TextWorld game, but {error}. Fix: pip install textworld."
            ) from error
        self._files, self._max_bytes = files, max_bytes
        self._env: Any = None
        self._open_file: Path | None = None
        self._observation, self._score = "", 0.0
        self.reset(seed=0)

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Start the game selected by the seed; the first observation begins with the game's goal."""
        file = self._files[seed % len(self._files)]
        if file != self._open_file:
            self.close()
            infos = self._textworld.EnvInfos(
                admissible_commands=True, won=True, objective=True, description=True, feedback=True
            )
            try:
                self._env, self._open_file = self._textworld.start(str(file), infos), file
            except Exception as error:  # any error of the interpreter
                raise ConfigError(
                    f"env.id={file} is not a TextWorld game: {error}. Create games with tw-make."
                ) from error
        state = self._env.reset()
        self._score = 0.0
        return self._update_observation(state, f"{state['objective']}\n{state['description']}")

    def step(self, command: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Execute a command; the reward is the increase of the score."""
        state, score, done = self._env.step(command)
        reward, self._score = float(score) - self._score, float(score)
        observation, info = self._update_observation(state, str(state["feedback"]).split("\n>")[0])
        return observation, reward, bool(done), False, info | {"is_success": bool(state["won"])}

    def _update_observation(self, state: Any, text: str) -> tuple[str, dict[str, Any]]:
        commands = [str(command) for command in state[COMMANDS_KEY] or ()]
        commands_text = "\nCommands: " + ", ".join(commands)
        observation = "\n".join(line for line in text.splitlines() if line.strip())
        self._observation = (
            truncate_text(observation, max(0, self._max_bytes - len(commands_text.encode()))) + commands_text
        )
        return self._observation, {COMMANDS_KEY: commands}

    def render(self) -> str:
        """Return the last observation, including the allowed commands."""
        return self._observation

    def close(self) -> None:
        """Close the game."""
        if self._env is not None:
            self._env.close()


TextFunction = Callable[[Any, Mapping[str, Any]], str]


def _find_text_function(path: str) -> TextFunction:
    return load(path, "words", wants="a function of (observation, info)", fits=takes(2))


OBSERVATION_BYTES, REPLY_BYTES = 1 << 11, 1 << 9
"""Maximum number of bytes of an observation, and of a reply, in the conversation."""
_COLOR_PATTERN = re.compile(r"\x1b\[([0-9;]*)m(.)(?:\x1b\[0m)?")


class GameSettings(DialogueSettings):
    """Config keys for a Gymnasium environment with discrete actions, described in text."""

    program_keys = ("id",)

    id: Annotated[str | None, ChangesStateIds] = None
    """Gymnasium id such as FrozenLake-v1, package.module:Class, or a TextWorld game or a folder of games (*.z8, *.ulx).
    Replies to a TextWorld game must contain one of the game's allowed commands, and the reset id selects the game."""
    kwargs: Annotated[dict[str, Any], ChangesStateIds] = {}
    """Keyword arguments of the environment's constructor."""
    words: str | None = None
    """Function (package.module:function) that converts (observation, info) to text; default: the environment's ansi
    rendering, with highlighted text in brackets."""
    action_words: list[str] = []
    """Words that select the discrete actions, in order, for example [left,down,right,up]; default: the action numbers.
    The last matching whole word of a reply selects the action."""
    max_turns: Turns = 20
    """Maximum number of replies per episode."""
    unread_reward: Annotated[float, Field(ge=-(10**6), le=0)] = -0.1
    """Reward of a reply that names no action; the state of the game does not change."""


@dataclass(kw_only=True)
class _Game(Dialogue):
    """State of the game in one environment."""

    env: Any
    commands: Sequence[str] = ()
    """Commands that the game accepts in this turn; empty if the actions never change."""


class GameEnv(DialogueEnv[_Game]):
    """Text environment of games: a reply names an action.

    Success is `is_success` in info; without this key, an action that ends the game with a reward above 0.
    """

    reply_bytes = REPLY_BYTES

    def __init__(self, spec: EnvSpec, cfg: GameSettings, num_envs: int) -> None:
        super().__init__(spec, cfg, [_Game(env=build_game(cfg)) for _ in range(num_envs)])
        self._cfg = cfg
        self._text_function = _find_text_function(cfg.words) if cfg.words else None
        self._action_names = get_action_names(cfg, self.dialogues[0].env)
        self._pattern = _build_pattern(self._action_names)

    def reset(self, env_indices: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        """Start a game in each environment, with the reset id as seed."""
        for env_index, start in zip(env_indices, starts, strict=True):
            game = self.dialogues[env_index] = _Game(env=self.dialogues[env_index].env)
            game.observation = self._format_observation(game, *game.env.reset(seed=start.reset_id))

    def play_turns(self, env_indices: Sequence[int]) -> list[TurnResult]:
        """Execute the action that each reply names."""
        return [self._play_turn(self.dialogues[env_index]) for env_index in env_indices]

    def _play_turn(self, game: _Game) -> TurnResult:
        matches = (_build_pattern(game.commands) if game.commands else self._pattern).findall(game.reply)
        if not matches:
            return TurnResult(self._cfg.unread_reward, False, False, False)
        action = matches[-1] if game.commands else self._action_names.index(matches[-1])
        observation, reward, terminated, truncated, info = game.env.step(action)
        if not np.isfinite(reward):
            raise EnvError(f"env '{self.spec.name}': the game returned reward {reward}, expected a finite number.")
        game.observation = self._format_observation(game, observation, info)
        success = bool(info.get("is_success", terminated and reward > 0))
        return TurnResult(float(reward), bool(terminated), bool(truncated), success)

    def _format_observation(self, game: _Game, observation: Any, info: Mapping[str, Any]) -> str:
        game.commands = info.get(COMMANDS_KEY, ())
        text = (
            self._text_function(observation, info)
            if self._text_function
            else _COLOR_PATTERN.sub(r"[\2]", str(game.env.render())).strip()
        )
        return truncate_text(text, OBSERVATION_BYTES)

    def close(self) -> None:
        """Close the games; idempotent."""
        for game in self.dialogues:
            game.env.close()


def _build_pattern(names: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches each of the names as a whole word.

    In the text "10", neither the name "1" nor the name "0" matches. Longer names come first, because a name may be
    a prefix of another name.
    """
    alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    # ASCII word boundaries, because not every script separates words by spaces.
    return re.compile(rf"(?<!\w)(?:{alternatives})(?!\w)" if alternatives else "$^", re.ASCII)


def build_game(cfg: GameSettings) -> Any:
    """Build the game of `env.id`.

    Raises:
        EmbodyError: the environment cannot be built (see `create`), or has no text rendering.
    """
    if files := find_game_files(cfg.id or ""):
        return TextWorldGame(files, OBSERVATION_BYTES)
    from embodyrl.envs.gym.create import create

    kwargs = {**({} if cfg.words else {"render_mode": "ansi"}), **cfg.kwargs}
    env = create(GymSettings(env_type="gym", id=cfg.id), kwargs)
    if not cfg.words and "ansi" not in (env.metadata.get("render_modes") or ()):
        raise ConfigError(
            f"env.id={cfg.id} has no text rendering (render mode ansi). Set env.words to a function that converts "
            "observations to text, or choose another env.id."
        )
    return env


def get_action_names(cfg: GameSettings, env: Any) -> list[str]:
    """Return the words that select the discrete actions, in the order of the action numbers.

    Raises:
        ConfigError: the actions are not discrete, or the number of words differs from the number of actions.
    """
    if isinstance(env, TextWorldGame):
        return []
    count = getattr(env.action_space, "n", None)
    if count is None:
        raise ConfigError(f"env.id={cfg.id}: the action space {env.action_space} is not supported, only Discrete.")
    names = cfg.action_words or [str(number) for number in range(int(count))]
    if len(names) != count or len({*names}) < len(names):
        raise ConfigError(f"env.action_words={names}: env.id={cfg.id} needs {count} different words, one per action.")
    return names


class GameFactory:
    """Factory of conversations with Gymnasium environments and TextWorld games."""

    settings = GameSettings

    def validate(self, cfg: GameSettings) -> list[str]:
        """Return config errors, one line each."""
        problems = name_problems("env.words", [] if cfg.words is None else [cfg.words], _find_text_function)
        if cfg.id is None:
            problems.append(
                "env.id is not set. Set it to a Gymnasium id with discrete actions, for example env.id=FrozenLake-v1."
            )
        elif cfg.action_words and find_game_files(cfg.id):
            problems.append(
                f"env.action_words: env.id={cfg.id} is a TextWorld game, which lists its own commands. Remove the key."
            )
        return problems

    def spec(self, cfg: GameSettings, context: EnvContext) -> EnvSpec:
        """Return the environment's spec: one task, with one initial state per seed."""
        env = build_game(cfg)
        get_action_names(cfg, env)
        env.close()
        prompt_bytes = (OBSERVATION_BYTES + REPLY_BYTES + 64) * (cfg.history + 1)
        return build_dialogue_spec(cfg, f"text/{cfg.id}", str(cfg.id), prompt_bytes)

    def make(self, cfg: GameSettings, context: EnvContext) -> GameEnv:
        """Build `context.num_envs` games in this process."""
        return GameEnv(self.spec(cfg, context), cfg, context.num_envs)


def number(observation: Any, info: Mapping[str, Any]) -> str:
    """Return an integer observation as text, for `env.words` and character-level models."""
    return f"{int(observation)}:"


FACTORY = GameFactory()
