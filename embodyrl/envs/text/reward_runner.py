"""Parallel execution of reward functions in child processes, with a timeout per reply and a failure count."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from embodyrl.clock import RunClock
from embodyrl.envs.text.protocol import Answer, RewardResult
from embodyrl.errors import EmbodyError
from embodyrl.registry import REWARDS, name_problems
from embodyrl.text.rewards.services import find_reward
from embodyrl.text.rewards.settings import TextRewardSettings

ERRORS, OVERLONG = "errors", "overlong"
"""Names of additional reward components: the number of failed reward calls, and the length penalty."""
_START_S, _GRACE_S, _ATTEMPTS, _FREEZE_S = 300.0, 5.0, 3, 1.0
"""Seconds for the start of a child process, extra seconds after the timeout of the child, maximum number of attempts,
and seconds of suspended time after which a batch is repeated."""
_CHILD_SCRIPT = "from embodyrl.text.rewards.child import main; main()"


def get_function_names(cfg: TextRewardSettings) -> list[str]:
    """Return the names of the configured reward functions; the first function defines success."""
    main_names = [name for name in (cfg.name, cfg.path) if name]
    main_components = {*main_names, *(component for name in main_names for component in _get_components(name))}
    return [*main_names, *(name for name in cfg.weights if name not in main_components)]


def find_reward_problems(cfg: TextRewardSettings) -> list[str]:
    """Return errors of the config section `reward`, one line each."""
    if cfg.name is None and cfg.path is None:
        return [
            f"reward.name and reward.path are not set. Set reward.name to one of {', '.join(REWARDS.names())}, or "
            "reward.path to package.module:function, an http address or the folder of a reward model."
        ]
    errors = [
        *name_problems("reward.name", [cfg.name] if cfg.name else [], find_reward),
        *name_problems("reward.path", [cfg.path] if cfg.path else [], find_reward),
    ]
    return errors or name_problems("reward.weights", get_function_names(cfg), find_reward)


def build_reward_runner(cfg: TextRewardSettings, max_tokens: int) -> RewardRunner:
    """Build the `RewardRunner` of a config; replies have at most `max_tokens` tokens."""
    names = tuple(get_function_names(cfg))
    # The weight of a function applies to each of its components.
    parts = [(name, component) for name in names for component in _get_components(name)]
    if cfg.overlong_buffer:
        parts.append((OVERLONG, OVERLONG))
    components = (*(component for _, component in parts), ERRORS)
    weights = (*(cfg.weights.get(component, cfg.weights.get(name, 1.0)) for name, component in parts), 0.0)
    return RewardRunner(cfg=cfg, names=names, components=components, weights=weights, max_tokens=max_tokens)


def _get_components(name: str) -> tuple[str, ...]:
    """Return the component names of a reward function: its attribute `components`, or its name."""
    return tuple(getattr(find_reward(name), "components", (name.rpartition(":")[2],)))


def compute_overlong_penalty(tokens: int, *, limit: int, buffer: int, factor: float) -> float:
    """Return the length penalty of DAPO (eq. 13): 0 up to limit - buffer tokens, then linear to -factor at `limit`."""
    return -factor * max(0.0, (tokens - (limit - buffer)) / buffer)


@dataclass
class RewardRunner:
    """Computes the rewards of replies in child processes, which start with the first batch.

    Picklable, because env workers receive a copy.
    """

    cfg: TextRewardSettings
    names: tuple[str, ...]
    components: tuple[str, ...]
    weights: tuple[float, ...]
    """Weight of each reward component in the total reward."""
    max_tokens: int
    _children: list[_Child] = field(default_factory=list, repr=False)

    def __call__(self, answers: Sequence[Answer]) -> list[RewardResult]:
        """Return the rewards of a batch; after a failure or timeout the reward is 0, and the failure is counted."""
        while len(self._children) < self.cfg.workers:
            self._children.append(_Child(self.names, self.cfg.timeout_s))
        stride = len(self._children)
        for index, child in enumerate(self._children):
            # Send all answers before the first result is read, so that the children work in parallel.
            child.send([[answer.prompt, answer.response, answer.reference] for answer in answers[index::stride]])
        replies = [child.receive() for child in self._children]
        return [
            self._build_result(answer, replies[index % stride][index // stride]) for index, answer in enumerate(answers)
        ]

    def _build_result(self, answer: Answer, reply: Any) -> RewardResult:
        problem = reply if isinstance(reply, str) else None
        values = [0.0] * len(self.components) if problem else [*reply, *[0.0] * (len(self.components) - len(reply))]
        values[-1] = float(problem is not None)
        if self.cfg.overlong_buffer:
            values[-2] = compute_overlong_penalty(
                answer.tokens,
                limit=self.max_tokens,
                buffer=self.cfg.overlong_buffer,
                factor=self.cfg.overlong_penalty,
            )
        return RewardResult(
            reward=sum(weight * value for weight, value in zip(self.weights, values, strict=True)),
            success=values[0] >= 1.0 - 1e-6,
            components=tuple(values),
            problem=problem,
        )

    def close(self) -> None:
        """End the processes; idempotent."""
        while self._children:
            self._children.pop().stop()


class _Child:
    """Child process that computes rewards; after a timeout, the process is replaced."""

    def __init__(self, names: Sequence[str], timeout_s: float) -> None:
        self._names, self._timeout_s = names, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: list[list[str]] = []
        self._buffer = b""

    def send(self, answers: list[list[str]]) -> None:
        """Send a batch of answers (prompt, response, reference); `receive` returns their rewards."""
        self._pending = answers
        for _ in range(_ATTEMPTS if answers else 0):
            try:
                if self._process is None:
                    self._process = self._start()
                assert self._process.stdin is not None
                self._process.stdin.write(json.dumps(answers).encode() + b"\n")
                return self._process.stdin.flush()
            except BrokenPipeError:  # it exited while idle
                self.stop()
        if answers:
            raise EmbodyError(
                f"The process of the reward functions {', '.join(self._names)} exits repeatedly. See the worker log."
            )

    def _start(self) -> subprocess.Popen[bytes]:
        # The child looks for a user's function where this process would find it.
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
        command = [sys.executable, "-c", _CHILD_SCRIPT, json.dumps([self._names, self._timeout_s])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
        if (first_line := self._read_line(_START_S, RunClock())) != b"ready":
            problem = first_line.decode() if first_line else f"no output (exit code {self.stop()})"
            self.stop()
            raise EmbodyError(
                f"The process of the reward functions {', '.join(self._names)} does not start: {problem}. "
                "Check that the modules of the functions can be imported."
            )
        return self._process

    def receive(self) -> list[list[float] | str]:
        """Return the reward components of each answer of the last `send`, or an error message for a failed answer."""
        replies: list[list[float] | str] = []
        freezes = 0
        while self._pending:
            started, clock = time.monotonic(), RunClock()
            line = self._read_line(self._timeout_s + _GRACE_S, clock)
            if time.monotonic() - started - clock.now() > _FREEZE_S and freezes < _ATTEMPTS:
                freezes += 1  # timeouts of the child included the suspended time, so repeat the batch
                self.stop()
                self.send(self._pending)
                continue
            if line:
                replies.append(json.loads(line))
                self._pending = self._pending[1:]
                continue
            code = self.stop()
            # The child is ended by its own alarm, or else by the timeout of this process.
            timed_out = line is None or code == -signal.SIGALRM
            problem = (
                f"no result within {self._timeout_s:g} s"
                if timed_out
                else f"the reward process exited with code {code}"
            )
            replies.append(problem)
            self.send(self._pending[1:])
        return replies

    def _read_line(self, seconds: float, clock: RunClock) -> bytes | None:
        """Return the next output line of the process: empty if the process exited, None after a timeout."""
        assert self._process is not None and self._process.stdout is not None
        while b"\n" not in self._buffer:
            if (remaining := seconds - clock.now()) <= 0:
                return None
            ready, _, _ = select.select([self._process.stdout], [], [], min(remaining, 0.5))
            data = os.read(self._process.stdout.fileno(), 1 << 16) if ready else None
            if data == b"":
                return data
            self._buffer += data or b""
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def stop(self) -> int | None:
        """Kill the process; return its exit code, or None if no process was running."""
        process, self._process, self._buffer = self._process, None, b""
        if process is not None:
            process.kill()
            process.communicate()
        return process.returncode if process is not None else None
