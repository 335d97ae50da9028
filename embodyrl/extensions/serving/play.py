"""Command `play`: watch a policy in the browser, type instructions, step and reset."""

from __future__ import annotations

import argparse
import html
import io
import json
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodyrl.cli.runs import find_run, latest_run
from embodyrl.config.trust import split_trust
from embodyrl.errors import ConfigError
from embodyrl.extensions.pages.loopback import Answer, Loopback

if TYPE_CHECKING:
    import numpy as np

    from embodyrl.extensions.own_loop.acting import LoadedPolicy

_WIDTH = 960
_WATCHED = ("video=all",)
"""Environment keys that affect rendering, set at construction."""
_FOR_EVER = ("env.eval.ignore_terminations=true", "env.eval.max_episode_steps=100000")
"""Disable the time limit: the user ends an episode."""


def play(args: argparse.Namespace) -> int:
    """Run `embodyrl play`."""
    trust, named = split_trust(args.words)
    if len(named) > 1 or not args.port.isdecimal():
        raise ConfigError("embodyrl play takes one run, and --port a number: embodyrl play runs/my_run --port 8000.")
    run = find_run(named[0]) if named else latest_run("embodyrl play", trained=True)
    print(f"loading {run.name} ...", file=sys.stderr, flush=True)
    scene = scene_of(run, trust)
    page = files("embodyrl.extensions.serving").joinpath("play.html").read_text(encoding="utf-8")
    gets = {"/frame.png": scene.frame, "/state": scene.state}
    server = Loopback(int(args.port), gets, {"/step": scene.step, "/reset": scene.reset, "/say": scene.say})
    page = page.replace("TOKEN", server.token).replace("RUN", html.escape(run.name))
    server.gets = {**gets, "/": lambda: ("text/html; charset=utf-8", page.encode())}
    try:
        server.show(open_page=args.open, name=f"{run.name}: ")
    finally:
        scene.env.close()
    return 0


def scene_of(run: Path, trust: Sequence[str] = ()) -> Scene:
    """Build the environment of a run with its policy."""
    from embodyrl.extensions.own_loop.acting import load_policy

    for words in ((*_WATCHED, *_FOR_EVER), _WATCHED):
        with suppress(ConfigError):  # for an environment that ends by itself, or renders no frames
            return Scene(load_policy(run, *words, *trust))
    return Scene(load_policy(run, *trust))


class Scene:
    """An environment, its policy, and the user's commands."""

    def __init__(self, policy: LoadedPolicy) -> None:
        self.policy, self.env = policy, policy.make_env()
        self.said = ""
        self._plan: deque[np.ndarray] = deque()
        self._seed = 0
        self.reset({})
        self.frame()  # otherwise the error would only appear on the page

    def reset(self, wanted: dict[str, Any]) -> Answer:
        """Reset the environment to a task; -1: any task."""
        task = wanted.get("task", -1)
        if type(task) is not int:
            raise ValueError("'task' must be an integer")
        self._seen, told = self.env.reset(seed=self._seed, options={"task": task} if task >= 0 else None)
        self._seed += 1
        self.task, self.said = told["task"], ""
        self._plan.clear()
        self._steps, self._success, self._over = 0, False, False
        return self.state()

    def say(self, wanted: dict[str, Any]) -> Answer:
        """Set the instruction for the next actions; empty: the task's own."""
        said = wanted.get("instruction")
        if not isinstance(said, str) or any("\ud800" <= letter <= "\udfff" for letter in said):
            raise ValueError("'instruction' must be a valid Unicode string")
        self.said = " ".join(said.split())[:200]
        self._plan.clear()
        return self.state()

    def step(self, wanted: dict[str, Any]) -> Answer:
        """Execute the next action."""
        if not self._over:
            if not self._plan:
                self._plan.extend(self.policy.act(self._seen, instruction=self.said or None))
            self._seen, _, ended, cut, info = self.env.step(self._plan.popleft())
            self._steps += 1
            self._success |= info["success"]
            self._over = ended or cut
        return self.state()

    def state(self) -> Answer:
        """Return the values shown next to the image."""
        told = {
            "tasks": self.env.layout.tasks,
            "task": self.task,
            "instruction": self.said or self._seen["instruction"],
            "steps": self._steps,
            "success": self._success,
            "over": self._over,
        }
        return "application/json", json.dumps(told).encode()

    def frame(self) -> Answer:
        """Return the rendered image as PNG."""
        from PIL import Image

        picture = Image.fromarray(self.env.render())
        scale = max(1, _WIDTH // picture.width)
        held = io.BytesIO()
        picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.BICUBIC).save(held, "PNG")
        return "image/png", held.getvalue()
