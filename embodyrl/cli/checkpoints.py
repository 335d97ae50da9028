"""The commands `ckpt` (list, verify, export and prune checkpoints of a run) and `push` (upload to the hub)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from embodyrl.checkpoint.store import CheckpointStore, parse_step, size_bytes
from embodyrl.cli.arguments import choose_name
from embodyrl.cli.output import show_result
from embodyrl.cli.runs import find_run
from embodyrl.config.paths import HUB_NAME, resolve_run
from embodyrl.config.trust import split_trust
from embodyrl.errors import CheckpointError, ConfigError


def ckpt(args: argparse.Namespace) -> int:
    """Run `embodyrl ckpt`, which lists, verifies, exports or prunes checkpoints."""
    actions = {"ls": _list_steps, "verify": _verify, "export": _export, "prune": _prune}
    usages = {"ls": "RUN", "verify": "RUN_OR_CHECKPOINT", "export": "RUN_OR_CHECKPOINT FOLDER", "prune": "RUN"}
    args.trust, args.arguments = split_trust(args.arguments)
    action = choose_name(args.arguments, actions, "embodyrl ckpt needs an action")
    if len(args.arguments) != 1 + len(usages[action].split()):
        raise ConfigError(
            f"embodyrl ckpt {action}: wrong number of arguments. Usage: embodyrl ckpt {action} {usages[action]}."
        )
    if args.keep is not None and action != "prune":
        raise ConfigError("--keep applies only to `embodyrl ckpt prune`; remove --keep.")
    return actions[action](args)


def _list_steps(args: argparse.Namespace) -> int:
    store = CheckpointStore(find_run(args.arguments[1]) / "checkpoints")
    best = store.best()
    rows = [
        {
            "step": step,
            "created": store.manifest(step).created,
            "bytes": size_bytes(store.path(step)),
            "best": step == best,
            "path": str(store.path(step)),
        }
        for step in store.steps()
    ]
    lines = [
        f"{row['step']:>8}  {row['created']}  {row['bytes'] / 2**20:>8.1f} MiB  {'best' if row['best'] else '    '}  "
        f"{row['path']}"
        for row in rows
    ]
    show_result(args, rows, lines or [f"no complete checkpoint in {store.root}/"])
    return 0


def _verify(args: argparse.Namespace) -> int:
    store, steps = _select_checkpoints(args.arguments[1])
    problems: list[dict[str, str]] = []
    for step in steps:
        try:
            store.verify(store.path(step))
        except CheckpointError as error:
            problems.append({"path": str(store.path(step)), "problem": str(error)})
    paths = [str(store.path(step)) for step in steps]
    damaged = {problem["path"] for problem in problems}
    lines = (f"{'FAIL' if path in damaged else 'ok':<4}  {path}" for path in paths)
    show_result(args, {"checked": paths, "problems": problems}, lines)
    if problems:
        raise CheckpointError("\n".join(problem["problem"] for problem in problems))
    return 0


def _export(args: argparse.Namespace) -> int:
    store, steps = _select_checkpoints(args.arguments[1])
    from embodyrl.commands.export import export

    out = export(store.root.parent, steps[-1], Path(args.arguments[2]), overrides=args.trust)
    show_result(args, {"path": out}, [f"exported {store.path(steps[-1])} to {out}"])
    return 0


def _prune(args: argparse.Namespace) -> int:
    if args.keep is None or not args.keep.isdecimal() or int(args.keep) < 1:
        raise ConfigError(
            "embodyrl ckpt prune needs --keep N. N is the number of newest checkpoints to keep, at least 1."
        )
    store = CheckpointStore(find_run(args.arguments[1]) / "checkpoints")
    from embodyrl.commands.run_folder import lock_folder

    best = store.best()
    with lock_folder(store.root.parent):
        deleted = store.prune(int(args.keep), [] if best is None else [best])
    best_text = f"and the best (step {best})" if best is not None else "no best checkpoint is recorded"
    text = (
        f"deleted {len(deleted)} checkpoints: {', '.join(map(str, deleted)) or 'none'}; kept the newest {args.keep}, "
        f"{best_text}"
    )
    show_result(args, {"deleted": deleted}, [text])
    return 0


def _select_checkpoints(argument: str) -> tuple[CheckpointStore, list[int]]:
    """Return the checkpoint store of a run and the selected steps: all steps, or the step of one checkpoint folder."""
    path = Path(argument)
    if path.parent.name == "checkpoints" and path.name.startswith("step_"):
        store, step = CheckpointStore(path.parent), parse_step(path.name)
        if step is None or not path.is_dir():
            raise CheckpointError(
                f"{path} is not the folder of a checkpoint. Steps with a checkpoint: {store.steps() or 'none'}."
            )
        return store, [step]
    store = CheckpointStore(find_run(argument) / "checkpoints")
    if not store.folders():
        raise CheckpointError(f"The run {argument} has no checkpoint. Choose another run: embodyrl list runs.")
    return store, store.folders()


def push(args: argparse.Namespace) -> int:
    """Run `embodyrl push`, which uploads a policy or a data set to the hub."""
    trust, arguments = split_trust(args.arguments)
    if len(arguments) != 2 or "@" in arguments[1] or not HUB_NAME.fullmatch(arguments[1]):
        raise ConfigError(
            "embodyrl push needs a folder and a repository (owner/name): embodyrl push runs/my_run me/my_policy."
        )
    source = resolve_run(arguments[0])
    if not source.is_dir():
        raise ConfigError(
            f"'{arguments[0]}' is neither a folder nor a run in ./runs. List the runs: embodyrl list runs."
        )
    print(f"pushing {source} to {arguments[1]} ...", file=sys.stderr, flush=True)
    from embodyrl.commands.export import push as upload

    commit = upload(source, arguments[1], private=args.private, overrides=trust)
    show_result(args, {"repository": arguments[1], "pinned": commit}, [f"pushed {source} as {commit}"])
    return 0
