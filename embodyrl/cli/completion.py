"""The command `completion`: what the shell needs to complete commands, flags, groups and keys."""

import argparse
from importlib.resources import files

from embodyrl.cli.commands import COMMANDS
from embodyrl.config import tree
from embodyrl.errors import ConfigError
from embodyrl.plan.keys import all_keys


def completion(args: argparse.Namespace) -> int:
    """Run `embodyrl completion bash|zsh`."""
    if args.words not in (["bash"], ["zsh"]):
        raise ConfigError('embodyrl completion takes bash or zsh: eval "$(embodyrl completion bash)".')
    flags = [f'        {name}:-*) words="{" ".join([*c.flags, "--help"])}" ;;' for name, c in COMMANDS.items()]
    parts = {
        "commands": " ".join(COMMANDS),
        "flags": "\n".join(flags),
        "options": " ".join(f"{g}={o}" for g in tree.default_options("train") for o in tree.options(g)),
        "keys": " ".join(f"{name}=" for name in all_keys()),
    }
    script = files("embodyrl.cli").joinpath("templates/completion.bash").read_text(encoding="utf-8")
    for mark, text in parts.items():
        script = script.replace(f"@{mark}@", text)
    print(("autoload -U bashcompinit && bashcompinit\n" if args.words == ["zsh"] else "") + script, end="")
    return 0
