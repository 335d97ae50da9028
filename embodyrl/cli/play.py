"""The command `play`, which opens a web page to watch and control a trained policy."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from embodyrl.cli.runs import find_newest_run, find_run
from embodyrl.config.trust import split_trust
from embodyrl.errors import ConfigError


def play(args: argparse.Namespace) -> int:
    """Run `embodyrl play`, which serves the page until the command is interrupted."""
    trust, runs = split_trust(args.arguments)
    if len(runs) > 1 or not args.port.isdecimal():
        raise ConfigError("embodyrl play takes one run and an integer --port: embodyrl play runs/my_run --port 8000.")
    run = find_run(runs[0]) if runs else find_newest_run("embodyrl play", is_training=True)
    print(f"loading {run.name} ...", file=sys.stderr, flush=True)
    from embodyrl.commands.run_folder import lock_folder
    from embodyrl.config.compose import format_override
    from embodyrl.plan.config import load_config
    from embodyrl.plan.saved import find_run_config
    from embodyrl.play.recording import Recording
    from embodyrl.play.request_handlers import RequestHandlers, get_page
    from embodyrl.play.scene import Scene, load_policy_with_env
    from embodyrl.web_pages.loopback import LoopbackServer

    with ExitStack() as stack:
        recording = None
        policy, env = load_policy_with_env(run, trust, records=args.record is not None)
        stack.callback(env.close)
        if args.record is not None:
            stack.enter_context(lock_folder(Path(args.record)))
            # Later evaluations of the data have the time limit of the run.
            environment = load_config("eval", [format_override("ckpt", str(run)), *trust], base=find_run_config(run))
            recording = Recording(Path(args.record), policy.run_plan, environment)
            stack.callback(recording.close)
        scene = Scene(policy, env, recording)
        stack.callback(scene.finish_episode)
        handlers = RequestHandlers(run.name, scene)
        server = LoopbackServer(int(args.port), {"/": get_page}, handlers.posts)
        server.show(open_page=args.open, name=f"{run.name}: ")
    return 0
