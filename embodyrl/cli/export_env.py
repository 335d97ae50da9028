"""The command `export-env`, which writes a repository for an environment in LeRobot's EnvHub format."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from embodyrl.cli.arguments import split_overrides
from embodyrl.cli.output import show_result
from embodyrl.errors import ConfigError
from embodyrl.files import replace_atomically
from embodyrl.parts import EXTRAS
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.version import __version__

_TEMPLATES = Path(__file__).parent / "env_hub"


def export_env(args: argparse.Namespace) -> int:
    """Run `embodyrl export-env ENV OUT [overrides]`."""
    paths, overrides = split_overrides(args.arguments)
    if len(paths) != 2:
        raise ConfigError(
            "embodyrl export-env takes an environment and a folder, for example: embodyrl export-env tabletop OUT."
        )
    env, out = paths[0], Path(paths[1])
    if out.exists():
        raise ConfigError(f"{out} already exists. Choose another folder, or remove it.")
    cfg = load_config("eval", [f"env={env}", "model=random", *overrides], config_dirs=args.config_dir)
    if cfg.reads_rows:
        raise ConfigError(f"env={env} is a text task without steps. Choose a simulator.")
    check_components(cfg)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot write to {out.parent}: {error.strerror}. Choose another folder.") from error
    with replace_atomically(out) as folder:
        folder.mkdir()
        values = {"env": env, "env_text": repr(env), "overrides": repr(tuple(overrides))}
        for template in sorted(_TEMPLATES.glob("*.tmpl")):
            text = template.read_text(encoding="utf-8")
            for placeholder, value in values.items():
                text = text.replace(f"@{placeholder}@", value)
            (folder / template.name.removesuffix(".tmpl")).write_text(text, encoding="utf-8")
        for options in reversed(args.config_dir):  # copied last: the first folder has priority
            shutil.copytree(options, folder / "conf", ignore=_list_ignored_files, dirs_exist_ok=True)
        extra = f"[{cfg.env.env_type}]" if cfg.env.env_type in EXTRAS.values() else ""
        (folder / "requirements.txt").write_text(f"embodyrl{extra}=={__version__}\n", encoding="utf-8")
    lines = [f"  {out}/{path.name}" for path in sorted(out.iterdir())]
    show_result(args, {"path": out}, [*lines, f"next: hf upload OWNER/NAME {out}"])
    return 0


def _list_ignored_files(folder: str, names: list[str]) -> list[str]:
    """Return the entries of a config folder that are neither options (.yaml) nor folders."""
    return [name for name in names if not name.endswith(".yaml") and not Path(folder, name).is_dir()]
