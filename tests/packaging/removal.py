"""Check source trees without extensions: `python removal.py TREE...` prints one JSON line per tree with its error.

Libraries are loaded once; each tree is imported in a separate process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path

LIBRARIES = (
    *("gymnasium.envs.classic_control", "hydra.compose", "hydra.core.override_parser.overrides_parser", "numpy.ma"),
    *(
        "omegaconf",
        "pyarrow.parquet",
        "pydantic",
        "rich.console",
        "safetensors.torch",
        "torch.distributed.fsdp",
        "yaml",
    ),
)

WORDS = (
    *("env=gym", "env.id=CartPole-v1", "model=mlp", "algorithm=ppo", "launcher=inline", "runner.max_steps=1"),
    *("env.train.total_num_envs=2", "env.train.max_steps_per_rollout_epoch=16", "env.train.max_episode_steps=16"),
    *("actor.micro_batch_size=8", "actor.global_batch_size=8", "runner.val_check_interval=-1"),
    "runner.logger.backends=[jsonl]",
)


def core_modules(package: Path) -> list[str]:
    """Return the modules of a tree that no extension owns."""
    from embodyrl.manifests import extensions

    owned = {package / path for extension in extensions().values() for path in extension.paths}
    files = (file for file in sorted(package.rglob("*.py")) if "templates" not in file.parts)
    own = (file for file in files if file.name != "__main__.py" and owned.isdisjoint((file, *file.parents)))
    parts = (file.relative_to(package.parent).with_suffix("").parts for file in own)
    return [".".join(names[:-1] if names[-1] == "__init__" else names) for names in parts]


def check(tree: Path) -> None:
    """Import every module of the core, print all lists, help, keys and a dry run, and train one step."""
    sys.path.insert(0, str(tree))
    import embodyrl

    assert Path(embodyrl.__file__).is_relative_to(tree), embodyrl.__file__
    for module in core_modules(tree / "embodyrl"):
        import_module(module)
    from embodyrl.cli.commands import COMMANDS
    from embodyrl.cli.main import main

    lists = [["list", kind] for kind in ("envs", "models", "algorithms", "launchers", "experiments", "extensions")]
    for words in (*lists, ["--help"], ["show", "train", "env=gym", "model=mlp"], ["train", *WORDS, "--dry-run"]):
        assert words[0] not in {*COMMANDS, "--help"} or main(words) == 0, words
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        assert main(["train", *WORDS, f"runner.output_dir={folder}", "runner.experiment_name=run"]) == 0
        rows = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(rows[-1])["step"] == 1


def run(tree: Path) -> str:
    """Check a tree in a child process; return its output if it fails."""
    log = tree / "log.txt"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                try:
                    check(tree)
                    code = 0
                except BaseException:
                    sys.stdout.flush()
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return "" if status == 0 else log.read_text()[-4000:] or f"status {status}"


if __name__ == "__main__":
    for library in LIBRARIES:
        import_module(library)
    import_module("torch").set_num_threads(1)
    gc.freeze()
    for name in sys.argv[1:]:
        sys.stdout.write(json.dumps({"tree": Path(name).name, "error": run(Path(name))}) + "\n")
        sys.stdout.flush()
