"""The command `play`, which opens a web page to watch and control a trained policy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.cli.runs import find_run, latest_run
from embodyrl.config.trust import split_trust
from embodyrl.errors import ConfigError
from embodyrl.extensions.pages.loopback import Answer

if TYPE_CHECKING:
    from embodyrl.extensions.own_loop.acting import LoadedPolicy
    from embodyrl.extensions.own_loop.environment import SingleEnv

_WATCHED = ("video=all",)
"""Override that makes the environment render images."""
_LONG = ("env.eval.max_episode_steps=100000",)
"""Override that removes the time limit of an episode, because the user ends the episode."""
_FOR_EVER = ("env.eval.ignore_terminations=true",)
"""Override that continues an episode after success; not used for recorded episodes."""


def play(args: argparse.Namespace) -> int:
    """Run `embodyrl play`, which serves the page until the command is interrupted."""
    trust, named = split_trust(args.words)
    if len(named) > 1 or not args.port.isdecimal():
        raise ConfigError("embodyrl play takes one run and an integer --port: embodyrl play runs/my_run --port 8000.")
    run = find_run(named[0]) if named else latest_run("embodyrl play", trained=True)
    print(f"loading {run.name} ...", file=sys.stderr, flush=True)
    from embodyrl.commands.run_folder import locked
    from embodyrl.config.compose import write_word
    from embodyrl.extensions.cockpit.desk import Desk
    from embodyrl.extensions.cockpit.recording import Recording
    from embodyrl.extensions.cockpit.scene import Scene
    from embodyrl.extensions.pages.loopback import Loopback
    from embodyrl.plan.config import load_config
    from embodyrl.plan.saved import run_config

    with ExitStack() as stack:
        recording = None
        policy, env = policy_with_env(run, trust, records=args.record is not None)
        stack.callback(env.close)
        if args.record is not None:
            stack.enter_context(locked(Path(args.record)))
            # Later evaluations of the data have the time limit of the run.
            environment = load_config("eval", [write_word("ckpt", str(run)), *trust], base=run_config(run))
            recording = Recording(Path(args.record), policy.run_plan, environment)
            stack.callback(recording.close)
        scene = Scene(policy, env, recording)
        stack.callback(scene.keep)
        desk = Desk(run.name, scene)
        server = Loopback(int(args.port), {"/": page}, desk.posts)
        server.show(open_page=args.open, name=f"{run.name}: ")
    return 0


def page() -> Answer:
    """Return the content type and the HTML of the page."""
    text = files("embodyrl.extensions.cockpit").joinpath("page.html").read_bytes()
    return "text/html; charset=utf-8", text


def policy_with_env(run: Path, trust: Sequence[str] = (), *, records: bool = False) -> tuple[LoadedPolicy, SingleEnv]:
    """Load the policy of a run and build its environment, if possible with images and without a time limit."""
    from embodyrl.extensions.own_loop.acting import load_policy
    from embodyrl.extensions.own_loop.environment import env_of

    endless = _LONG if records else (*_LONG, *_FOR_EVER)
    for words in ((*_WATCHED, *endless), _WATCHED):
        with suppress(ConfigError):  # for an environment that ends by itself, or renders no frames
            policy = load_policy(run, *words, *trust)
            return policy, env_of(policy.run_plan, takes_delay=True)
    policy = load_policy(run, *trust)
    return policy, env_of(policy.run_plan, takes_delay=True)
